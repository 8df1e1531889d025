"""The runner of one worker, which runs closures one after the other. It does not depend on Ray.

A closure that fails ends neither the worker nor closures of other workers. Closures that this worker received with it,
or before the driver knew of the failure, are cancelled: the program gets the first error soon.
"""

from __future__ import annotations

import contextlib
import functools
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, TypeVarTuple, final

import torch

from raydist.actors.class_tracking import cloudpickle
from raydist.actors.portable_errors import PortableError, pack_error
from raydist.actors.readers.replica_iterator import ReplicaIterator
from raydist.collectives.base import Communicator, Membership
from raydist.collectives.single_rank import SingleRank
from raydist.core.errors import FailedPreconditionError, OutOfRangeError
from raydist.core.values import InputContext, Leaves
from raydist.mirroring.messages import MirrorCalls, StepPayload
from raydist.replicas.ps.work_message import ClosureLabel, ClosureResult, LogEntry, WorkItem, WorkMessage, WorkResult
from raydist.replicas.rules import StrategyHooks, VariablesView
from raydist.replicas.runner import ReplicaRunner
from raydist.replicas.step import ReplicaSetup, StepHeader
from raydist.replicas.step_message import KeptObjects

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

_STATE_CALLS = (MirrorCalls.collect_optimizer_state.__name__, MirrorCalls.dump.__name__)


class WorkerRules(StrategyHooks):
    """Rules of a worker, a replica without peers. All hooks run in the worker's one thread.

    Around each closure: `before_run`, the function (with `step_optimizer`), `after_run` if it succeeded,
    `after_failure` if it raised, and `end_closure`.
    """

    exchanges_gradients = False

    @abstractmethod
    def before_run(self, variables: VariablesView, closure: ClosureLabel) -> None:
        """Prepare for a closure that is about to run."""

    @abstractmethod
    def after_failure(self, variables: VariablesView) -> None:
        """Recover after an error of the closure, or of a read between closures."""

    @abstractmethod
    def end_closure(self, variables: VariablesView, *, last: bool) -> None:
        """Clean up after a closure, whether it succeeded or not."""

    @abstractmethod
    def versions(self) -> tuple[int, ...]:
        """Return, by server, the newest version that this worker knows of; each answer reports it to the driver."""

    @abstractmethod
    def settle(self, variables: VariablesView) -> Any:
        """Describe new variables, after the driver gave objects or values to this worker alone; no closure runs.

        Returns:
            The facts from which the driver plans the placement, with `specs`: the new variables.
        """

    @abstractmethod
    def place(self, variables: VariablesView, plan: Any, closure: ClosureLabel) -> None:
        """Carry out the driver's plan with this worker's values. `follow` comes next."""

    @abstractmethod
    def follow(self, variables: VariablesView, plan: Any) -> None:
        """Adjust to a change by the driver that was made to this worker's objects.

        Args:
            plan: The placement of new variables; None if there are none.
        """

    @abstractmethod
    def restore_servers(self, variables: VariablesView, order: Any) -> None:
        """Create all variables on servers that have started again, and make the servers begin to read a checkpoint.

        Args:
            order: The restore: a `HandledRestore`.
        """

    @abstractmethod
    def before_read(self, variables: VariablesView, *, states: bool) -> None:
        """Bring this worker's objects up to date before the driver reads them."""

    def injected(self) -> Mapping[str, Any]:
        """Return, by name, the values that functions may use on this worker, beside those of every replica."""
        return {}

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the driver reads or writes this worker's objects, after `before_read`."""
        return contextlib.nullcontext()


@final
class WorkerRunner:
    """Runs the closures that one worker is given. Used by one thread.

    Args:
        setup: Setup of the worker; its rules are :class:`WorkerRules`.
        drawn: By iterator name, the number of batches that ended closures have used.
    """

    def __init__(
        self, setup: ReplicaSetup, num_workers: int = 1, generation: int = 0, drawn: Mapping[str, int] | None = None
    ) -> None:
        if not isinstance(setup.rules, WorkerRules):
            raise FailedPreconditionError(f"raydist bug: a worker needs WorkerRules, got {type(setup.rules).__name__}.")
        self._setup = setup
        self._rules = setup.rules
        self._context = InputContext(num_workers, setup.rank, 1)
        self._runner = ReplicaRunner(setup, _join_alone)
        for name, value in self._rules.injected().items():
            self._runner.mirrored.injected.add(name, functools.partial(_given, value))
        self._objects = KeptObjects()
        self._starts = generation
        self._drawn = dict(drawn or {})
        self._iterators: dict[str, ReplicaIterator] = {}
        self._generation = -1
        self._failed_epoch = -1
        self._unplaced: tuple[int, ...] = ()
        self._rejoin()

    def _rejoin(self) -> None:
        self._generation += 1
        self._runner.join(Membership(self._setup.name, self._generation, rank=0, world_size=1))

    def steps(self, message: WorkMessage, objects: Sequence[Leaves]) -> WorkResult:
        """Run some closures."""
        began = time.perf_counter()
        held = self._objects.receive(message.objects, objects)
        for name, used in message.used.items():
            if name in self._iterators:
                self._iterators[name].confirm(used - self._drawn.get(name, 0))
        last = len(message.items) - 1
        results = tuple(self._closure(item, held, last=place == last) for place, item in enumerate(message.items))
        remarks = self._runner.mirrored.take_remarks()
        seconds = time.perf_counter() - began
        return WorkResult(results, tuple(self._rules.versions()), remarks, seconds, drawn=self._num_drawn())

    def _num_drawn(self) -> dict[str, int]:
        """Return, by iterator, the number of batches drawn by this process and by earlier generations."""
        now = {name: self._drawn.get(name, 0) + iterator.num_drawn for name, iterator in self._iterators.items()}
        return now

    def _closure(self, item: WorkItem, objects: Sequence[Leaves], *, last: bool) -> ClosureResult:
        try:
            self.follow(item.entries)
            if item.epoch <= self._failed_epoch:
                return ClosureResult(cancelled=True)
            return self._run(item, objects, last=last)
        except BaseException as error:  # whatever it is, it is an error of the closure
            self._failed_epoch = item.epoch
            return ClosureResult(error=self._packed(error, item))

    def _packed(self, error: BaseException, item: WorkItem) -> PortableError:
        return pack_error(error, f"In closure {item.label.number} on worker {self._setup.rank}.")

    def _run(self, item: WorkItem, objects: Sequence[Leaves], *, last: bool) -> ClosureResult:
        variables = self._runner.variables
        step = item.step(self._generation)
        if step.looks_only:
            return self._look(step)
        try:
            self._rules.before_run(variables, item.label)
            try:
                return ClosureResult(self._runner.run_one(step, objects))
            except StopIteration as error:
                self._recover()
                raise OutOfRangeError(
                    "The function of a closure must draw no more batches than there are, but an iterator of it has "
                    "ended: schedule as many closures as there are batches, or end at this error."
                ) from error
            except BaseException:
                self._recover()
                raise
        finally:
            self._rules.end_closure(self._runner.variables, last=last)

    def _look(self, step: StepHeader) -> ClosureResult:
        """Run a closure that changes nothing, with present values; no other closure runs anywhere."""
        self._rules.before_read(self._runner.variables, states=False)
        try:
            with self._rules.reading():
                return ClosureResult(self._runner.run_one(step, ()))
        except BaseException:
            self._recover()
            raise

    def _recover(self) -> None:
        self._rejoin()
        self._rules.after_failure(self._runner.variables)

    def follow(self, entries: Sequence[bytes]) -> None:
        """Apply packed log entries of the driver, in order."""
        self._drop_unplaced()
        for packed in entries:
            entry = LogEntry.unpacked(packed)
            self._apply(entry)
            self._rules.follow(self._runner.variables, entry.plan)

    def _apply(self, entry: LogEntry) -> None:
        mirror = self._runner.mirrored
        for name in entry.dropped:
            value = mirror.injected.drop(name)
            self._iterators.pop(name, None)
            if isinstance(value, ReplicaIterator):
                value.end()
        if entry.payload is not None:
            mirror.take(entry.payload)
        for name, maker in entry.values:
            mirror.injected.add(name, functools.partial(self._make, name, maker))

    def _make(self, name: str, maker: bytes) -> Any:
        value = cloudpickle.loads(maker)(self._context, self._drawn.get(name, 0), self._starts)
        if isinstance(value, ReplicaIterator):
            self._iterators[name] = value
        return value

    def settle(self, entries: Sequence[bytes], latest: bytes) -> Any:
        """Follow `entries`, then apply the entry `latest`; return what `WorkerRules.settle` returns.

        If no `place` follows, the next call drops the new objects: the driver has the error, and goes on without them.
        """
        self.follow(entries)
        known = {handle for handle, _ in self._runner.mirrored.items()}
        try:
            self._apply(LogEntry.unpacked(latest))
        finally:
            self._unplaced = tuple(handle for handle, _ in self._runner.mirrored.items() if handle not in known)
        return self._rules.settle(self._runner.variables)

    def place(self, plan: Any, label: ClosureLabel) -> tuple[int, ...]:
        """Carry out the plan that the driver made from `settle`; return what `WorkerRules.versions` returns then."""
        self._rules.place(self._runner.variables, plan, label)
        self._rules.follow(self._runner.variables, plan)
        self._unplaced = ()
        return tuple(self._rules.versions())

    def restore_servers(self, entries: Sequence[bytes], order: Any) -> None:
        """Follow `entries`, then call `WorkerRules.restore_servers`."""
        self.follow(entries)
        self._rules.restore_servers(self._runner.variables, order)

    def _drop_unplaced(self) -> None:
        if self._unplaced:
            self._runner.mirrored.take(StepPayload(released=self._unplaced))
            self._unplaced = ()

    def mirror(self, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> _T:
        """Call this worker's half of the mirrored variables, with present values."""
        self._rules.before_read(self._runner.variables, states=method.__name__ in _STATE_CALLS)
        with self._rules.reading():
            return self._runner.mirror(method, *args)

    def tell_everything(self) -> None:
        """Report everything to the driver again, which does not know what this worker has reported."""
        self._runner.mirrored.tell_everything()

    def nonfinite_counts(self) -> tuple[int, int]:
        """Return what `ReplicaRunner.nonfinite_counts` returns."""
        return self._runner.nonfinite_counts()

    def ping(self) -> None:
        """Return once all earlier calls have run."""

    def close(self) -> None:
        """Release all resources."""
        self._runner.close()


def _given(value: _T) -> _T:
    return value


def _join_alone(membership: Membership, *, device: torch.device, timeout_s: float, backend: str = "") -> Communicator:
    """Create a group of one, which needs no network."""
    return SingleRank(membership, device, timeout_s)
