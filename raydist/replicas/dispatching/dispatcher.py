"""Which steps are sent when: soon while the replicas wait for work, in full groups while they are busy."""

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

_BUSY = 2  # groups under way: one that the replicas work on, and one that they find when they are done with it
_SLICE_S = 5.0  # how long the thread may sleep beyond the end of the dispatcher


@final
class DispatchedStep:
    """A step that was handed to the dispatcher. Results hold it: so it holds nothing of what the step was given.

    Attributes:
        step: Its number.
        group: Its group, once it was sent.
        place: Its place in there.
    """

    __slots__ = ("group", "place", "step")

    def __init__(self, step: int) -> None:
        self.step = step
        self.group: SentGroup | None = None
        self.place = 0


@final
@dataclass(frozen=True, slots=True)
class Failure:
    """A step that failed, for which the replicas refuse all that follow.

    Attributes:
        step: Its number.
        error: What it raised.
    """

    step: int
    error: Exception

    def consequence(self, step: int) -> CancelledError:
        """Return the error of a later step."""
        error = CancelledError(
            f"Step {step} was given up, because step {self.step} failed ({describe(self.error)}). The first error is "
            "the cause of this one: mend that."
        )
        error.__cause__ = what_was_raised(self.error)
        return error


@final
class SentGroup:
    """Steps that were sent in one message to each replica, and what is known of how they ended.

    Args:
        first_step: Number of the first one.
        keys: Of each step's function.
        refs: Of what each replica will answer.
        none_given: For each step, that `run` returned None before it was done.

    Attributes:
        surprise: A step returned a value where `run` had returned None; None as long as none is known to have.
        error: What a step of it raised; None as long as none is known to have failed.
        cause: An earlier step that failed, for which the replicas refuse these; None where there is none.
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
        """Steps in it."""
        return len(self.keys)

    @property
    def title(self) -> str:
        """Its steps, for messages."""
        last = self.first_step + self.num_steps - 1
        return f"step {last}" if last == self.first_step else f"steps {self.first_step} to {last}"

    @property
    def num_done(self) -> int:
        """Steps that every replica has done."""
        return self.num_steps if self.error is None else self._failed_at

    @property
    def seconds_a_step(self) -> float:
        """What a step took, on the slowest replica."""
        return max((answer.seconds for answer in self._answers or ()), default=0.0) / self.num_steps

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the program should be warned of."""
        return tuple(remark for answer in self._answers or () for remark in answer.remarks)

    @property
    def finished(self) -> bool:
        """Whether it is known how the steps ended."""
        return self._answers is not None

    def succeed(self, answers: Sequence[GroupResult]) -> None:
        """Every replica has done every step."""
        self._answers = answers
        for place, none_given in enumerate(self.none_given):
            if none_given and not all(result.is_none or result.absent for result in self.results_at(place)):
                self.surprise = self.surprise or InvalidArgumentError(
                    f"A step function that returned None must do so in every call, but step {self.first_step + place} "
                    "returned a value, and `run` had returned None by then. Return a value always, or another function."
                )

    def fail(self, error: Exception, answers: Sequence[GroupResult]) -> None:
        """A step failed on some replica; `answers` hold what each replica did before."""
        self._answers = answers
        done = min((len(answer.results) for answer in answers), default=0)
        self._failed_at = min(done, self.num_steps - 1)
        self.error = error
        if self.cause is not None and isinstance(error, CancelledError):
            self.error = self.cause.consequence(self.first_step + self._failed_at)

    @property
    def failure(self) -> Failure | None:
        """The step that failed first, here or before; None as long as none has."""
        if self.error is None or self.cause is not None:
            return self.cause
        return Failure(self.first_step + self._failed_at, self.error)

    def drop_summaries(self) -> None:
        """They have been written: results may live for long."""
        self._answers = [answer.without_summaries() for answer in self._answers or ()]

    def results_at(self, place: int) -> list[StepResult]:
        """Every replica's result of one step; raises its error."""
        if self.error is not None and place == self._failed_at:
            raise what_was_raised(self.error).with_traceback(None)
        if self.failure is not None and self.error is not None and place > self._failed_at:
            raise self.failure.consequence(self.first_step + place)
        return [answer.results[place] for answer in self._answers or ()]


@final
class Dispatcher:
    """Gathers steps while the replicas are busy and sends them when one of the groups under way is done.

    Long steps of many replicas also wait a moment for company though replicas could begin: their messages cost much.

    Args:
        send: Sends some steps in one message to each replica; gives the refs of the answers.
        await_done: Waits up to so many seconds for the first of these refs to be there; whether it is.
        pace: What steps took so far.
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
        self._unfinished: deque[SentGroup] = deque()  # whose errors nobody has looked for
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def num_steps(self) -> int:
        """Steps that nobody has waited for."""
        with self._changed:
            return len(self._gathered) + sum(group.num_steps for group in self._unfinished)

    def window_with(self, step: PlannedStep) -> int:
        """How many steps may be under way if `step` is to be added."""
        with self._changed:
            return self._pace.window(self._keys(step))

    def add(self, step: PlannedStep) -> DispatchedStep:
        """Send a step, now or with others as soon as a group is done. Does not wait."""
        dispatched = DispatchedStep(step.header.step)
        with self._changed:
            at_once = step.carries_values  # asks for parts, so that steps whose results it uses are sent now
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
        """Whether nothing is gained if what was gathered stays."""
        keys = self._keys()
        if len(keys) >= self._pace.group_size(keys):
            return True
        return len(self._running) < _BUSY and self._linger_s(keys) <= 0

    def _linger_s(self, keys: Sequence[bytes]) -> float:
        """How much longer what was gathered waits for company, where replicas could begin."""
        linger_s = self._pace.linger_s(keys)
        return self._gathered_at + linger_s - time.monotonic() if linger_s else 0.0

    def _keys(self, *more: PlannedStep) -> list[bytes]:
        return [step.header.shipment.digest for step in (*(planned for _, planned in self._gathered), *more)]

    def flush(self) -> None:
        """Send what was gathered."""
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
        """The first group whose errors nobody has looked for; None when there is nothing under way."""
        with self._changed:
            if not self._unfinished:
                self._send_gathered()
            return self._unfinished[0] if self._unfinished else None

    def is_under_way(self, group: SentGroup) -> bool:
        """Whether it is yet to be waited for."""
        with self._changed:
            return group in self._unfinished

    def finished(self, group: SentGroup) -> None:
        """It is known how the oldest group ended."""
        with self._changed:
            self._unfinished.remove(group)
            self._note_done(group)

    def give_up(self) -> list[SentGroup]:
        """Forget everything under way: the groups that nobody will wait for. What was gathered is sent before."""
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
        """Run by the thread: the program may do something else while its steps wait."""
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
        """End the thread. What was gathered stays where it is. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * _SLICE_S)
