"""Steps in flight on replicas in lock step: sending steps, waiting for results, reporting errors."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, TypeVarTuple, final

from raydist.actors.replica import ReplicaActors
from raydist.actors.supervision import wait_for_all
from raydist.errors import FailedPreconditionError, Preempted, UnavailableError
from raydist.foreign_errors import what_was_raised
from raydist.options import Timeouts
from raydist.owning_process import OwningProcess
from raydist.preemption.boundaries import leave
from raydist.replicas.dispatching.dispatcher import DispatchedStep, Dispatcher, Failure, SentGroup
from raydist.replicas.dispatching.pace import Pace
from raydist.replicas.results import StepOutcome, StepResult
from raydist.replicas.runner import ReplicaRunner
from raydist.replicas.step_message import GroupResult, PlannedStep, SentObjects, address_steps
from raydist.values import Part

__all__ = ["DispatchedSteps", "ReplicaCalls"]

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


@final
class ReplicaCalls:
    """Calls to the runners of all replicas. One thread uses this class; any thread may call `beside`.

    Args:
        actors: The replicas' processes.
        num_replicas: Number of replicas.
        timeouts: The limit of every wait.

    Attributes:
        generation: Current generation (incarnation) of the process group; -1 before the first.
        failed: True if something failed since the current generation was formed.
        dead: The error of a replica that is gone for good.
    """

    def __init__(self, actors: ReplicaActors, num_replicas: int, timeouts: Timeouts) -> None:
        self.generation = -1
        self.failed = False
        self.dead: UnavailableError | None = None
        self._actors = actors
        self._ranks = range(num_replicas)
        self._step_s = timeouts.step_s

    def require_alive(self) -> None:
        """Raise if a replica is gone for good.

        Raises:
            UnavailableError: A replica is gone.
        """
        if self.dead is not None:
            raise self.dead

    def ask(self, rank: int, method: Callable[[ReplicaRunner, *_Args], object], *args: *_Args) -> Any:
        """Call a method of one replica's runner by name; return the reference of its result. Does not block."""
        return self._actors.call(rank, method.__name__, *args)

    def ask_all(self, method: Callable[[ReplicaRunner, *_Args], object], *args: *_Args) -> list[Any]:
        """Call `ask` for every replica, in rank order."""
        return [self.ask(rank, method, *args) for rank in self._ranks]

    def answer_of(self, rank: int, ref: Any, doing: str) -> Any:
        """Return one replica's result; blocks for at most `Timeouts.step_s`."""
        return self.wait([ref], self._step_s, doing, "Timeouts.step_s", names=[self._actors.names[rank]])[0]

    def answers_of_all(self, refs: Sequence[Any], doing: str) -> list[Any]:
        """Return every replica's result; blocks for at most `Timeouts.step_s`."""
        return self.wait(refs, self._step_s, doing, "Timeouts.step_s")

    def wait(
        self,
        refs: Sequence[Any],
        timeout_s: float,
        doing: str,
        limit: str,
        *,
        names: Sequence[str] | None = None,
        present: bool = True,
    ) -> list[Any]:
        """Wait for results; see `supervision.wait_for_all`.

        Args:
            refs: References of the results.
            timeout_s: Longest wait in seconds.
            doing: The activity, for messages.
            limit: Name of the setting that gives the limit, for messages.
            names: Names of the called replicas; None for all replicas.
            present: An error concerns the current generation of the group: `failed` and `dead` are updated.
        """
        try:
            return self._actors.wait(
                refs,
                names or self._actors.names,
                timeout_s=timeout_s,
                doing=doing,
                limit=limit,
                on_error=self.give_up if present else _nothing,
            )
        except Exception as error:
            if present:
                self.failed = True
                if isinstance(error, UnavailableError) and error.actor is not None:
                    self.dead = error
            raise

    def beside(
        self, method: Callable[[ReplicaRunner, *_Args], _T], *args: *_Args, ranks: Sequence[int] | None = None
    ) -> list[_T]:
        """Return what replicas (None: all) answer concurrently with their steps. Thread-safe; changes no state here."""
        asked = self._ranks if ranks is None else ranks
        refs = [self._actors.ask_beside(rank, method.__name__, *args) for rank in asked]
        names = [self._actors.names[rank] for rank in asked]
        return wait_for_all(
            refs, names, timeout_s=self._step_s, doing="saving", limit="Timeouts.step_s", on_error=_nothing
        )

    def give_up(self) -> None:
        """Abort the collectives of every replica, because one of the replicas will not take part."""
        self.failed = True
        self._actors.control_all(ReplicaRunner.abort.__name__, self.generation)


def _nothing() -> None:
    return None


@final
class DispatchedSteps:
    """A window of steps, sent in order. Thread-safe: one thread waits for steps, the others wait for that thread.

    Args:
        actors: The replicas' processes.
        calls: Calls to the runners; records that a step failed.
        num_replicas: Number of replicas.
        step_s: Time limit of a step in seconds.
        process: The process that may use this object.

    Attributes:
        num_replicas: Number of replicas.
    """

    def __init__(
        self, actors: ReplicaActors, calls: ReplicaCalls, num_replicas: int, step_s: float, process: OwningProcess
    ) -> None:
        self.num_replicas = num_replicas
        self._actors = actors
        self._calls = calls
        self._step_s = step_s
        self._process = process
        self._turn = threading.RLock()
        self._sent = tuple(SentObjects() for _ in range(num_replicas))
        self._pace = Pace(num_replicas)
        self._dispatcher = Dispatcher(self._send, lambda ref, within_s: actors.are_ready([ref], within_s), self._pace)
        self._untold: Exception | None = None
        self._failure: Failure | None = None  # the first of this generation
        self._last = -1  # number of the last dispatched step
        self.on_results: list[Callable[[Sequence[StepResult]], None]] = []
        """Callbacks for each ended step, in order, with all replicas' results. They must neither raise nor block."""

    @property
    def num_under_way(self) -> int:
        """Number of steps that nobody has waited for."""
        return self._dispatcher.num_steps

    def dispatch(self, step: PlannedStep) -> StepOutcome:
        """Send one step to every replica, now or soon.

        Blocks only while the window is full; the error of the oldest steps may be raised then.
        """
        self._calls.require_alive()
        with self._turn:
            while self._dispatcher.num_steps >= self._dispatcher.window_with(step):
                self._finish_oldest()
                self.tell()
            step.carries_values  # noqa: B018  # may block on arguments: must not happen in the dispatcher
            self._last = step.header.step
            return _Outcome(self, self._dispatcher.add(step))

    def _send(self, steps: Sequence[PlannedStep]) -> list[Any]:
        try:
            messages = address_steps(steps, self._sent)
            return [self._actors.send(rank, *message) for rank, message in enumerate(messages)]
        except BaseException:  # KeyboardInterrupt, too: replicas with the steps would wait for replicas without them
            self._calls.give_up()
            raise

    def wait(self) -> None:
        """Wait for every dispatched step; raise the error of the first step that failed."""
        with self._turn:
            self.tell()
            while self._finish_oldest():
                self.tell()

    def until_now(self) -> Callable[[], None]:
        """Return a function that waits, in any thread, for the steps dispatched so far. Later calls raise errors."""
        last = self._last

        def wait() -> None:
            with self._turn:
                while (group := self._dispatcher.oldest()) is not None and group.first_step <= last:
                    self._finish_oldest()

        return wait

    def give_up(self) -> None:
        """Forget steps in flight: they follow a failed step, and the replicas refuse them."""
        for group in self._dispatcher.give_up():
            group.cause = self._failure
            self._actors.discard(group.refs)
        self._failure = None
        for sent in self._sent:
            sent.forget()

    def tell(self) -> None:
        """Raise the error of a step that has not been raised yet."""
        self._process.require("used")
        error, self._untold = self._untold, None
        if error is not None:
            raise _to_raise(error).with_traceback(None)

    def _finish_oldest(self) -> bool:
        """Wait for the oldest group; return False if there is none. `tell` raises its error later."""
        group = self._dispatcher.oldest()
        if group is None:
            return False
        consequence = self._calls.failed  # of an error that was reported already
        group.cause = self._failure
        try:
            self._finish(group)
        finally:
            self._dispatcher.finished(group)
        self._failure = group.failure
        if not consequence:
            self._untold = self._untold or group.error or group.surprise
        return True

    def _finish(self, group: SentGroup, *, present: bool = True) -> None:
        """Wait until the steps of a group have ended. `present` is False for steps of an earlier generation."""
        try:
            group.succeed(self._wait_for(group, present=present))
        except Exception as error:
            before = self._actors.done_before_failure(group.refs)
            group.fail(error, [answer or GroupResult(()) for answer in before])
        else:
            self._learn(group)
        for place in range(group.num_done):
            for told in self.on_results:
                told(group.results_at(place))
        group.drop_summaries()
        for remark in group.remarks:
            warnings.warn(remark, stacklevel=2)

    def _wait_for(self, group: SentGroup, *, present: bool) -> list[GroupResult]:
        limit_s = self._step_s * group.num_steps
        return self._calls.wait(group.refs, limit_s, group.title, "Timeouts.step_s", present=present)

    def _learn(self, group: SentGroup) -> None:
        for place, key in enumerate(group.keys):
            size = max(result.num_bytes for result in group.results_at(place))
            self._pace.learn(key, seconds=group.seconds_a_step, num_bytes=size)

    def results_of(self, step: DispatchedStep) -> list[StepResult]:
        """Return the results of one step in rank order. Blocks; raises the step's error, at every call."""
        self._process.require("used")
        with self._turn:
            return self._results_of(step)

    def _results_of(self, step: DispatchedStep) -> list[StepResult]:
        group = self._group_of(step)
        while not group.finished and self._dispatcher.is_under_way(group):
            self._finish_oldest()
            if not group.finished:
                self.tell()
        if not group.finished:
            self._finish(group, present=False)
        try:
            return group.results_at(step.place)
        except BaseException as error:
            _to_raise(error)
            # The caller gets the error here, so closing the strategy must not raise the same error again.
            if self._untold is not None and error is what_was_raised(self._untold):
                self._untold = None
            raise

    def _group_of(self, step: DispatchedStep) -> SentGroup:
        if step.group is None:
            self._dispatcher.flush()
        if step.group is None:
            raise FailedPreconditionError(f"raydist bug: step {step.step} must have been sent by now.")
        return step.group

    def part_of(self, step: DispatchedStep, rank: int, leaf_index: int, nest: str) -> Part:
        """Return a reference to one leaf of one replica's result; the reader checks that the result has this nest."""
        return Part(ref=self._group_of(step).refs[rank], leaf_index=leaf_index, place=step.place, nest=nest)

    def close(self) -> None:
        """Stop sending steps."""
        self._dispatcher.close()


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Outcome(StepOutcome):
    """A step on all replicas."""

    steps: DispatchedSteps
    step: DispatchedStep

    @property
    def num_replicas(self) -> int:
        return self.steps.num_replicas

    def results(self) -> list[StepResult]:
        return self.steps.results_of(self.step)

    def part(self, rank: int, leaf_index: int, nest: str) -> Part:
        return self.steps.part_of(self.step, rank, leaf_index, nest)


def _to_raise(error: BaseException) -> BaseException:
    """Return the original error. After a preemption of the replicas, the driver leaves the process group, too."""
    raised = what_was_raised(error)
    if isinstance(raised, Preempted):
        leave(before_draw=False)
    return raised
