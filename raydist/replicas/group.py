"""The driver's end of a set of replica actors: dispatch steps, wait, call, rebuild after an error, stop.

One group serves every strategy whose replicas run in lock step. It knows nothing of variables or datasets.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, TypeVarTuple, final

from raydist.actors.replica import ReplicaActors
from raydist.actors.software import Software, installed_software, require_devices, require_same_software
from raydist.actors.step_channel import Answer
from raydist.collectives.base import Communicator, Membership
from raydist.collectives.ray_backend import create_group
from raydist.collectives.rendezvous import RendezvousStore
from raydist.errors import DeadlineExceededError, FailedPreconditionError, Preempted
from raydist.foreign_errors import what_was_raised
from raydist.mirroring.calls import MirrorCalls
from raydist.options import Timeouts
from raydist.owning_process import OwningProcess
from raydist.preemption.boundaries import leave
from raydist.replicas.dispatcher import DispatchedStep, Dispatcher, SentGroup
from raydist.replicas.kept_objects import SentObjects
from raydist.replicas.pace import Pace
from raydist.replicas.replica_calls import ReplicaCalls
from raydist.replicas.results import StepOutcome, StepResult
from raydist.replicas.runner import ReplicaRunner
from raydist.replicas.step import ReplicaSetup
from raydist.replicas.step_message import GroupResult, PlannedStep, address_steps
from raydist.values import Part

__all__ = ["ReplicaGroup"]

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


@final
class ReplicaGroup:
    """N replicas in lock step. Used by one thread."""

    def __init__(
        self,
        setups: Sequence[ReplicaSetup],
        actors: ReplicaActors,
        store: RendezvousStore,
        timeouts: Timeouts,
        *,
        hosts: Sequence[str] = (),
        join_group: Callable[..., Communicator] = create_group,
    ) -> None:
        self._setups = tuple(setups)
        self._actors = actors
        self._timeouts = timeouts
        self._store = store
        self._join_group = join_group
        self.hosts = tuple(hosts)  # node ids, in rank order
        self._calls = ReplicaCalls(actors, len(setups), timeouts)
        self._sent = tuple(SentObjects() for _ in setups)
        self._pace = Pace(len(setups))
        self._dispatcher = Dispatcher(self._send, lambda ref, within_s: actors.are_ready([ref], within_s), self._pace)
        self._untold: Exception | None = None
        self._silent = False
        self._process = OwningProcess("A strategy with its variables and results")
        self.on_results: list[Callable[[Sequence[StepResult]], None]] = []
        """Told of each step that has ended, in their order: every replica's result. Must not raise, or wait."""

    @property
    def num_replicas(self) -> int:
        return len(self._setups)

    @property
    def generation(self) -> int:
        """Of the group as it is now; a step must name it."""
        return self._calls.generation

    @property
    def failed(self) -> bool:
        """A step failed since the group was built: replicas refuse further ones until it is rebuilt."""
        return self._calls.failed

    def start(self) -> None:
        """Build the runners and the first generation. Blocks until every replica answers (limit: `start_s`).

        Raises:
            FailedPreconditionError: A replica's node has other versions, or lacks its device.
        """
        asked = [self._actors.about(setup.rank) for setup in self._setups]
        refs = [self._actors.start(setup.rank, ReplicaRunner, setup, self._join_group) for setup in self._setups]
        found: list[Software] = self._calls.wait(asked, self._timeouts.start_s, "starting", "Timeouts.start_s")
        require_same_software(installed_software(), found, self._actors.names)
        require_devices([setup.device for setup in self._setups], found, self._actors.names)
        self._calls.wait(refs, self._timeouts.start_s, "starting", "Timeouts.start_s")
        self._store.start()
        self.rebuild()
        self._actors.open_channel(self._timeouts.start_s)

    def rebuild(self) -> None:
        """Form a new generation of all replicas; what failed before is forgotten. Dispatched steps are given up."""
        self._tell()
        self._calls.require_alive()
        self._give_up_dispatched()
        self._calls.generation += 1
        refs = [self._calls.ask(setup.rank, ReplicaRunner.join, self._membership(setup)) for setup in self._setups]
        self._calls.wait(refs, self._timeouts.start_s, "joining the group", "Timeouts.start_s")
        self._calls.failed = False

    def _give_up_dispatched(self) -> None:
        """Forget steps that nobody will wait for: they follow one that failed, and were refused."""
        for group in self._dispatcher.give_up():
            self._actors.discard(group.refs)
        for sent in self._sent:
            sent.forget()

    def _membership(self, setup: ReplicaSetup) -> Membership:
        return self._store.membership(
            setup.name,
            generation=self._calls.generation,
            rank=setup.rank,
            world_size=setup.world_size,
            hosts=self.hosts,
        )

    def dispatch(self, step: PlannedStep) -> StepOutcome:
        """Send one step to every replica, now or soon.

        Blocks only while too many are under way; then the error of the oldest ones may come out.
        """
        self._calls.require_alive()
        while self._dispatcher.num_steps >= self._dispatcher.window_with(step):
            self._finish_oldest()
            self._tell()
        step.carries_values  # noqa: B018  # results among its arguments may have to be waited for: not in the dispatcher
        return _Outcome(self, self._dispatcher.add(step))

    def _send(self, steps: Sequence[PlannedStep]) -> list[Any]:
        try:
            return self._actors.send_steps(address_steps(steps, self._sent))
        except BaseException:  # KeyboardInterrupt: who was sent the steps would wait for who was not
            self._calls.give_up()
            raise

    def wait(self) -> None:
        """Return once every dispatched step is done; raises the error of the first that failed."""
        self._tell()
        while self._finish_oldest():
            self._tell()

    def wait_to_close(self) -> None:
        """As :meth:`wait`, but for replicas only whose processes still answer beside their steps.

        Raises:
            DeadlineExceededError: One does not within `close_s`; the steps are given up.
        """
        if not self._actors.reachable:
            return  # Ray was shut down: there is nothing to wait for
        silent = self._actors.silent(self._timeouts.close_s) if self._dispatcher.num_steps else []
        if silent:
            self._silent = True
            raise DeadlineExceededError(
                f"Dispatched steps must end before the strategy closes, but {' and '.join(silent)} did not even say "
                f"that it works within {self._timeouts.close_s:g} s (Timeouts.close_s). Its process may be stopped, or "
                "its machine unreachable; it is killed now."
            )
        self.wait()

    def _tell(self) -> None:
        """Raise the error of a step that nobody has been told about."""
        self._process.require("used")
        error, self._untold = self._untold, None
        if error is not None:
            raise _to_raise(error)

    def _finish_oldest(self) -> bool:
        """Wait for the oldest group; False if there is none. An error is told later."""
        group = self._dispatcher.oldest()
        if group is None:
            return False
        consequence = self._calls.failed  # of what was told already
        try:
            self._finish(group)
        finally:
            self._dispatcher.finished(group)
        self._untold = self._untold if consequence else group.error
        return True

    def _finish(self, group: SentGroup, *, present: bool = True) -> None:
        """Wait until it is known how the steps ended. One that nobody waited for says nothing about what is now."""
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
        limit_s = self._timeouts.step_s * group.num_steps
        return self._calls.wait(group.refs, limit_s, group.title, "Timeouts.step_s", present=present)

    def _learn(self, group: SentGroup) -> None:
        for place, key in enumerate(group.keys):
            size = max(result.num_bytes for result in group.results_at(place))
            self._pace.learn(key, seconds=group.seconds_a_step, num_bytes=size)

    def results_of(self, step: DispatchedStep) -> list[StepResult]:
        """The results of one step in rank order; raises its error, as often as it is asked for."""
        self._process.require("used")
        group = self._group_of(step)
        while not group.finished and self._dispatcher.is_under_way(group):
            self._finish_oldest()
            if not group.finished:
                self._tell()
        if not group.finished:
            self._finish(group, present=False)
        try:
            return group.results_at(step.place)
        except BaseException as error:
            _to_raise(error)
            # What came of it is told here, and not again when the strategy closes.
            if self._untold is not None and error is what_was_raised(self._untold):
                self._untold = None
            raise

    def _group_of(self, step: DispatchedStep) -> SentGroup:
        if step.group is None:
            self._dispatcher.flush()
        if step.group is None:
            raise FailedPreconditionError(f"raydist bug: step {step.step} must have been sent by now.")
        return step.group

    def part_of(self, step: DispatchedStep, rank: int, leaf_index: int) -> Part:
        """Where a leaf of one replica's result of a step will be; the leaf itself where only the driver has it.

        Blocks until the step is done, where its result comes through the step channel.
        """
        known_by = self._group_of(step).refs[rank]
        if not isinstance(known_by, Answer):
            return Part(ref=known_by, leaf_index=leaf_index, place=step.place)
        result = self.results_of(step)[rank]
        if known_by.ref is not None:
            return Part(ref=known_by.ref, leaf_index=leaf_index, place=step.place)
        return Part(value=result.leaf(leaf_index))

    def answers(self, within_s: float) -> bool:
        """Whether every replica has done what was dispatched and answers; waits up to `within_s`."""
        if self._calls.dead is not None or self._silent or not self._actors.reachable:
            return False
        refs = self._calls.ask_all(ReplicaRunner.ping)
        self._silent = not self._actors.are_ready(refs, within_s)
        return not self._silent

    def nonfinite_counts(self) -> tuple[int, int]:
        """See `ReplicaRunner.nonfinite_counts`; equal on all replicas. Waits for all dispatched steps."""
        self.wait()
        ref = self._calls.ask(0, ReplicaRunner.nonfinite_counts)
        found: tuple[int, int] = self._calls.answer_of(0, ref, "counting")
        return found

    def ask_mirror(self, rank: int, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> _T:
        """What one replica's mirrored variables answer, after all dispatched steps; raises an error of theirs."""
        self.wait()
        ref = self._calls.ask(rank, ReplicaRunner.mirror, method, *args)
        found: _T = self._calls.answer_of(rank, ref, f"{method.__name__} of the variables")
        return found

    def ask_mirrors(self, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> list[_T]:
        """What every replica's mirrored variables answer, in rank order; waits and raises as `ask_mirror`."""
        self.wait()
        refs = self._calls.ask_all(ReplicaRunner.mirror, method, *args)
        return self._calls.answers_of_all(refs, f"{method.__name__} of the variables")

    def ask_beside(
        self, method: Callable[[ReplicaRunner, *_Args], _T], *args: *_Args, ranks: Sequence[int] | None = None
    ) -> list[_T]:
        """What replicas (None: all) answer beside their steps. Any thread may ask; changes nothing here."""
        return self._calls.beside(method, *args, ranks=ranks)

    def close(self, *, gently: bool) -> None:
        """Stop the replicas; `gently` lets them leave their group first. Never raises because one is gone already."""
        if not self._process.is_this:
            return  # a forked child drops its copy
        if gently and not self._calls.failed and self.answers(self._timeouts.close_s / 2):
            refs = self._calls.ask_all(ReplicaRunner.close)
            with contextlib.suppress(Exception):  # what does not stop gently is killed next
                self._calls.wait(refs, self._timeouts.close_s / 2, "closing", "Timeouts.close_s")
        self._give_up_dispatched()
        self._actors.kill()
        self._dispatcher.close()
        self._store.close()


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Outcome(StepOutcome):
    """A step of a group of replicas."""

    group: ReplicaGroup
    step: DispatchedStep

    @property
    def num_replicas(self) -> int:
        return self.group.num_replicas

    def results(self) -> list[StepResult]:
        return self.group.results_of(self.step)

    def part(self, rank: int, leaf_index: int) -> Part:
        return self.group.part_of(self.step, rank, leaf_index)


def _to_raise(error: BaseException) -> BaseException:
    """What was raised. Where replicas have left the process, the driver's side leaves it now, too."""
    raised = what_was_raised(error)
    if isinstance(raised, Preempted):
        leave(before_draw=False)
    return raised
