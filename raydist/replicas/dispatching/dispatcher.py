"""The time at which steps are sent: at once while the replicas are idle, in full groups while they are busy."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from raydist.errors import CancelledError, InvalidArgumentError
from raydist.foreign_errors import describe, what_was_raised
from raydist.replicas.dispatching.pace import Pace
from raydist.replicas.results import StepResult
from raydist.replicas.step_message import GroupResult, PlannedStep

__all__ = ["DispatchedStep", "Dispatcher", "Failure", "SentGroup"]

_BUSY = 2  # groups in flight: one that the replicas run, and one in their queue
_SLICE_S = 5.0  # longest time that the thread lives on after `close`


@final
class DispatchedStep:
    """A step that was handed to the dispatcher. Results refer to this object, so it holds no arguments of the step.

    Attributes:
        step: Number of the step.
        group: The group with the step, once it was sent.
        place: Position of the step in the group.
    """

    __slots__ = ("group", "place", "step")

    def __init__(self, step: int) -> None:
        self.step = step
        self.group: SentGroup | None = None
        self.place = 0


@final
@dataclass(frozen=True, slots=True)
class Failure:
    """A step that failed. The replicas refuse all steps after it.

    Attributes:
        step: Number of the failed step.
        error: The error that the step raised.
    """

    step: int
    error: Exception

    def consequence(self, step: int) -> CancelledError:
        """Return the error of a step after the failed one."""
        error = CancelledError(
            f"Step {step} was given up, because step {self.step} failed ({describe(self.error)}). The first error is "
            "the cause of this one: mend that."
        )
        error.__cause__ = what_was_raised(self.error)
        return error


@final
class SentGroup:
    """Steps that were sent in one message to each replica, and their results once these are known.

    Args:
        first_step: Number of the first step.
        keys: Digest of each step's function.
        refs: Reference of each replica's answer.
        none_given: For each step, True if `run` returned None before the step was done.

    Attributes:
        surprise: Error of a step that returned a value although `run` had returned None; None if no such step is known.
        error: Error of a step in the group; None if no failure is known.
        cause: An earlier step that failed, because of which the replicas refuse these steps; None without one.
    """

    def __init__(
        self, first_step: int, keys: Sequence[bytes], refs: Sequence[Any], none_given: Sequence[bool] = ()
    ) -> None:
        self.first_step = first_step
        self.keys = tuple(keys)
        self.refs = tuple(refs)
        self.none_given = tuple(none_given)
        self.surprise: Exception | None = None
        self.error: Exception | None = None
        self.cause: Failure | None = None
        self._answers: Sequence[GroupResult] | None = None
        self._failed_at = 0

    @property
    def num_steps(self) -> int:
        """Number of steps in the group."""
        return len(self.keys)

    @property
    def title(self) -> str:
        """The step numbers, for messages."""
        last = self.first_step + self.num_steps - 1
        return f"step {last}" if last == self.first_step else f"steps {self.first_step} to {last}"

    @property
    def num_done(self) -> int:
        """Number of steps that every replica has completed."""
        return self.num_steps if self.error is None else self._failed_at

    @property
    def seconds_a_step(self) -> float:
        """Average seconds a step, on the slowest replica."""
        return max((answer.seconds for answer in self._answers or ()), default=0.0) / self.num_steps

    @property
    def remarks(self) -> tuple[str, ...]:
        """Warnings for the program."""
        return tuple(remark for answer in self._answers or () for remark in answer.remarks)

    @property
    def finished(self) -> bool:
        """True once the results of the steps, or their failure, are known."""
        return self._answers is not None

    def succeed(self, answers: Sequence[GroupResult]) -> None:
        """Record the results of every replica; all steps succeeded."""
        self._answers = answers
        for place, none_given in enumerate(self.none_given):
            if none_given and not all(result.is_none or result.absent for result in self.results_at(place)):
                self.surprise = self.surprise or InvalidArgumentError(
                    f"A step function that returned None must do so in every call, but step {self.first_step + place} "
                    "returned a value, and `run` had returned None by then. Return a value always, or another function."
                )

    def fail(self, error: Exception, answers: Sequence[GroupResult]) -> None:
        """Record that a step failed on some replica; `answers` hold the results of each replica before the failure."""
        self._answers = answers
        done = min((len(answer.results) for answer in answers), default=0)
        self._failed_at = min(done, self.num_steps - 1)
        self.error = error
        if self.cause is not None and isinstance(error, CancelledError):
            self.error = self.cause.consequence(self.first_step + self._failed_at)

    @property
    def failure(self) -> Failure | None:
        """The step that failed first, in this or an earlier group; None without a failure."""
        if self.error is None or self.cause is not None:
            return self.cause
        return Failure(self.first_step + self._failed_at, self.error)

    def drop_summaries(self) -> None:
        """Drop the summaries, which have been written by now: results may live long."""
        self._answers = [answer.without_summaries() for answer in self._answers or ()]

    def results_at(self, place: int) -> list[StepResult]:
        """Return every replica's result of the step at `place`; raises the step's error."""
        if self.error is not None and place == self._failed_at:
            raise what_was_raised(self.error).with_traceback(None)
        if self.failure is not None and self.error is not None and place > self._failed_at:
            raise self.failure.consequence(self.first_step + place)
        return [answer.results[place] for answer in self._answers or ()]


@final
class Dispatcher:
    """A queue of steps that collects while the replicas are busy, and sends when a group in flight is done.

    With many replicas, long steps also wait a moment for further steps although replicas are idle: messages are costly.

    Args:
        send: Sends some steps in one message to each replica; returns the references of the answers.
        await_done: Waits up to so many seconds for the given reference; returns True if it is ready.
        pace: Measured costs of steps.
    """

    def __init__(
        self,
        send: Callable[[Sequence[PlannedStep]], list[Any]],
        await_done: Callable[[Any, float], bool],
        pace: Pace,
    ) -> None:
        self._send = send
        self._await_done = await_done
        self._pace = pace
        self._changed = threading.Condition()
        self._gathered: list[tuple[DispatchedStep, PlannedStep]] = []
        self._gathered_at = 0.0
        self._running: deque[SentGroup] = deque()  # not known to be done
        self._unfinished: deque[SentGroup] = deque()  # whose errors nobody has read
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def num_steps(self) -> int:
        """Number of steps that nobody has waited for."""
        with self._changed:
            return len(self._gathered) + sum(group.num_steps for group in self._unfinished)

    def window_with(self, step: PlannedStep) -> int:
        """Return how many steps may be in flight if `step` is added."""
        with self._changed:
            return self._pace.window(self._keys(step))

    def add(self, step: PlannedStep) -> DispatchedStep:
        """Send a step, now or with others as soon as a group is done. Does not block."""
        dispatched = DispatchedStep(step.header.step)
        with self._changed:
            at_once = step.carries_values  # reads the parts, which sends the steps whose results they are
            if self._gathered and len(self._gathered) + 1 > self._pace.group_size(self._keys(step)):
                self._send_gathered()
            if not self._gathered:
                self._gathered_at = time.monotonic()
            self._gathered.append((dispatched, step))
            if at_once or self._is_to_go():
                self._send_gathered()
            else:
                self._wake_thread()
        return dispatched

    def _is_to_go(self) -> bool:
        """Return True if collecting further steps gains nothing."""
        keys = self._keys()
        if len(keys) >= self._pace.group_size(keys):
            return True
        return len(self._running) < _BUSY and self._linger_s(keys) <= 0

    def _linger_s(self, keys: Sequence[bytes]) -> float:
        """Return for how many more seconds the collected steps wait for further ones while replicas are idle."""
        linger_s = self._pace.linger_s(keys)
        return self._gathered_at + linger_s - time.monotonic() if linger_s else 0.0

    def _keys(self, *more: PlannedStep) -> list[bytes]:
        return [step.header.shipment.digest for step in (*(planned for _, planned in self._gathered), *more)]

    def flush(self) -> None:
        """Send the collected steps."""
        with self._changed:
            self._send_gathered()

    def _send_gathered(self) -> None:
        if self._gathered:
            keys, steps = self._keys(), self._gathered
            self._gathered = []
            refs = self._send([planned for _, planned in steps])
            none_given = [planned.returns_none for _, planned in steps]
            group = SentGroup(steps[0][0].step, keys, refs, none_given)
            for place, (step, _) in enumerate(steps):
                step.group, step.place = group, place
            self._running.append(group)
            self._unfinished.append(group)

    def oldest(self) -> SentGroup | None:
        """Return the first group whose errors nobody has read; None if there is none."""
        with self._changed:
            if not self._unfinished:
                self._send_gathered()
            return self._unfinished[0] if self._unfinished else None

    def is_under_way(self, group: SentGroup) -> bool:
        """Return True if nobody has waited for the group."""
        with self._changed:
            return group in self._unfinished

    def finished(self, group: SentGroup) -> None:
        """Note that the results of the oldest group are known."""
        with self._changed:
            self._unfinished.remove(group)
            self._note_done(group)

    def give_up(self) -> list[SentGroup]:
        """Send the collected steps, forget all groups in flight, and return these groups."""
        with self._changed:
            self._send_gathered()
            groups = list(self._unfinished)
            self._unfinished.clear()
            self._running.clear()
            return groups

    def _note_done(self, group: SentGroup) -> None:
        if group in self._running:
            self._running.remove(group)
            if len(self._running) < _BUSY:
                self._send_gathered()

    def _wake_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_when_done, name="raydist-dispatch", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _send_when_done(self) -> None:
        """Send steps when a group is done. Runs in a thread: the program may be busy while its steps wait."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._gathered)
                if self._closed:
                    return
                group = self._running[0] if len(self._running) >= _BUSY else None
                if group is None:
                    self._send_or_linger()
            if group is not None and self._await_done(group.refs[0], _SLICE_S):
                with self._changed:
                    self._note_done(group)

    def _send_or_linger(self) -> None:
        linger_s = self._linger_s(self._keys())
        if linger_s <= 0:
            self._send_gathered()
        else:
            self._changed.wait(linger_s)

    def close(self) -> None:
        """End the thread. Collected steps are not sent. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * _SLICE_S)
