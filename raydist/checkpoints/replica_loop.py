"""The replica's part of saves during a run whose step function draws batches itself; see also `driver_loop.py`.

Each draw is a step boundary. Every replica counts draws and calls of `save` in the same way, so that all replicas copy
their shards of a save at the same boundary. A thread writes the shards while the run continues.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, final

from torch import nn

from raydist.checkpoints.listing import as_metrics, checkpoint_path, require_number
from raydist.checkpoints.loop_commands import (
    IteratorPosition,
    LoopCommand,
    LoopCount,
    LoopReport,
    ManagerCommand,
    RequestedSave,
    SaveOutcome,
)
from raydist.checkpoints.object_state import PendingGradients
from raydist.checkpoints.saves import MAX_FAILURES
from raydist.checkpoints.shards import ShardRequest, ShardTerms, ShardWriter
from raydist.context.replica_context import loop_here
from raydist.core.errors import DeadlineExceededError, FailedPreconditionError, Preempted
from raydist.parameter_servers.sharded_embedding import SavedRows
from raydist.pipelines.formats.files import shown_uri
from raydist.summary.record import Record

_sending: ContextVar[bool] = ContextVar("raydist_sending_managers", default=False)


@contextlib.contextmanager
def sending_managers() -> Iterator[None]:
    """Pickle managers as proxies inside the `with` block, for a step function that draws batches itself."""
    token = _sending.set(True)
    try:
        yield
    finally:
        _sending.reset(token)


def may_send_managers() -> bool:
    """Return True inside a `sending_managers` block."""
    return _sending.get()


@final
class ManagerProxy:
    """A proxy for a manager of the driver, for step functions on a replica."""

    def __init__(self, key: str) -> None:
        self._key = key

    def save(
        self,
        checkpoint_number: int | None = None,
        check_interval: bool = True,
        metrics: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do `CheckpointManager.save`. All replicas must call `save` after the same draw; the calls count as one."""
        save: Callable[..., Any] | None = getattr(loop_here(), "save", None)
        if save is None:
            raise FailedPreconditionError(
                "A checkpoint must be saved by the driver, or after a draw from a distributed iterator that was passed "
                "to strategy.run, but this step was given none. Call save() between two runs."
            )
        return save(self._key, checkpoint_number, check_interval, metrics)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise FailedPreconditionError(
            f"Inside of strategy.run a CheckpointManager has `save` only, {name!r} was asked for. Ask it on the driver."
        )


@final
class DrawGate:
    """A counter of draws in one replica's run, with which the driver stops all replicas at the same draw.

    The driver calls `hold` on each replica, and passes the largest returned number to `stop_after` on all of them. A
    replica that has drawn fewer batches first draws up to that number, so that no replica waits for a peer that has
    stopped. A held draw waits at most `limit_s` seconds for the driver.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._changed = threading.Condition()
        self._num_draws = 0
        self._is_held = False
        self._stop_at: int | None = None

    def draw(self) -> bool:
        """Count a draw; return True if the replica must stop instead of drawing. Blocks while held.

        Raises:
            DeadlineExceededError: The driver did not decide in time where the replicas stop.
        """
        with self._changed:
            if self._is_held and not self._changed.wait_for(self._is_decided, self._limit_s):
                raise DeadlineExceededError(
                    f"The driver must say within {self._limit_s:g} s (Timeouts.step_s) at which batch replicas "
                    "stop, and has not. It may be stuck, or overloaded."
                )
            if self._stop_at is not None and self._num_draws >= self._stop_at:
                return True
            self._num_draws += 1
            return False

    def _is_decided(self) -> bool:
        return not self._is_held or self._stop_at is not None

    def hold(self) -> int:
        """Block further draws until `stop_after` or `go_on`; return the number of draws so far. Thread-safe."""
        with self._changed:
            self._is_held = True
            return self._num_draws

    def stop_after(self, num_draws: int) -> None:
        """Stop once `num_draws` draws have begun."""
        with self._changed:
            self._stop_at = num_draws
            self._changed.notify_all()

    def go_on(self) -> None:
        """Release held draws without stopping."""
        with self._changed:
            self._is_held = False
            self._changed.notify_all()


class ReplicaSide(Protocol):
    """The operations of a replica that `ReplicaLoop` needs."""

    def object_of(self, handle: int) -> Any:
        """Return the replica's object for a handle of the driver."""

    def settle(self) -> None:
        """Finish the exchange between replicas after a batch. All replicas call this together."""

    def leave(self) -> None:
        """Finish the run, which stops at this boundary. All replicas call this together."""

    def agree(self, number: float) -> float:
        """Return the maximum of `number` over all replicas."""

    def copy(self, token: str, terms: ShardTerms, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
        """Copy this replica's shard of a save. Errors are reported when the driver asks for the shard."""

    def positions(self) -> tuple[IteratorPosition, ...]:
        """Return the positions of the run's iterators."""

    def take_records(self) -> tuple[Record, ...]:
        """Return the summaries that the run has recorded since the last call."""


@final
class LoopSave:
    """The handle of a save that a step function requested.

    Attributes:
        path: Path of the checkpoint.
    """

    def __init__(self, path: str, outcome: Callable[[float | None], SaveOutcome | None]) -> None:
        self.path = path
        self._outcome = outcome

    def done(self) -> bool:
        """Return True once the save has completed or failed. Does not block."""
        return self._outcome(0.0) is not None

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the checkpoint is complete; raise the error of a failed save."""
        outcome = self._outcome(timeout_s)
        if outcome is None:
            raise DeadlineExceededError(
                f"The checkpoint {shown_uri(self.path)!r} must be written in time, it is not yet. Wait longer, or "
                "raise Timeouts.step_s."
            )
        if outcome.error is not None:
            raise outcome.error.restore()


@final
@dataclass(slots=True)
class _ManagerCounts:
    """One manager's settings and counts, continued on this replica."""

    command: ManagerCommand
    calls: int  # number of calls of `save`
    last_step: int | None  # value of the step counter at the last save
    last_save: float  # time of the last save, by the monotonic clock
    token: str = ""  # id of the last save


@final
class ReplicaLoop:
    """One run. The run's thread calls `draw` and `save`; a control thread calls `report` and `end_save`."""

    def __init__(self, step: int, command: LoopCommand, side: ReplicaSide) -> None:
        self.step = step
        self._side = side
        self._limit_s = command.limit_s
        self._is_repeated = command.is_repeated
        now = time.monotonic()
        self._managers = {
            each.key: _ManagerCounts(each, each.count.calls, each.count.last_step, now - each.seconds)
            for each in command.managers
        }
        self.gate = DrawGate(command.limit_s)
        self._changed = threading.Condition()
        self._requested: dict[str, RequestedSave] = {}
        self._records: dict[str, tuple[Record, ...]] = {}  # summaries up to a save, until the driver takes them
        self._outcomes: dict[str, SaveOutcome] = {}
        self._num_saves = 0
        self._preempted: Preempted | None = None

    def draw(self) -> None:
        """Count a draw, or save and stop if the driver has stopped the run here. Called before each draw.

        Raises:
            Preempted: The process must end, and a checkpoint of its progress is complete.
        """
        if self.gate.draw():
            if self._preempted is None:
                self._preempted = self._save_before_end()
            raise self._preempted

    def _save_before_end(self) -> Preempted:
        """Save with every manager, wait for the saves, and return the exception that ends the process."""
        self._side.leave()
        managers = self._managers.values()
        tokens = [self._begin(each, self._last_step_of(each), None, is_last=True) for each in managers]
        outcomes = [self._await(token) for token in tokens]
        ends = [outcome.preempted for outcome in outcomes if outcome is not None and outcome.preempted is not None]
        return ends[0] if ends else Preempted(message="This process is to end.")

    def save(
        self, key: str, number: int | None = None, check_interval: bool = True, metrics: Mapping[str, Any] | None = None
    ) -> LoopSave | None:
        """Save as `CheckpointManager.save` does."""
        manager = self._counts_of(key)
        manager.calls += 1
        step = self._step_of(manager)
        if check_interval and not self._is_due(manager, step):
            return None
        number = step if number is None else number
        require_number(number)
        self._await_last(manager)
        token = self._begin(manager, number, as_metrics(metrics, manager.command.metric))
        manager.last_step, manager.last_save, manager.token = step, time.monotonic(), token
        path = checkpoint_path(manager.command.directory, f"{manager.command.name}-{number}")
        handle = LoopSave(path, lambda timeout_s: self._await(token, timeout_s))
        if not manager.command.asynchronous:
            handle.wait()
        return handle

    def _counts_of(self, key: str) -> _ManagerCounts:
        found = self._managers.get(key)
        if found is None:
            raise FailedPreconditionError(
                "A CheckpointManager must be open and watching before replicas save by it. Call its "
                "restore_or_initialize() or watch() before strategy.run."
            )
        return found

    def _step_of(self, manager: _ManagerCounts) -> int:
        if manager.command.counts_calls:
            return manager.calls
        if manager.command.counter is None:
            raise FailedPreconditionError(
                "What counts the steps of a CheckpointManager must be a variable of the strategy where replicas save, "
                "got a function, or a variable that no step has used. Give step_counter=rd.get_global_step()."
            )
        return int(self._side.object_of(manager.command.counter).item())

    def _last_step_of(self, manager: _ManagerCounts) -> int:
        """Return the result of `_step_of`, or the step at the run's beginning if only the driver has the counter."""
        known = manager.command.counts_calls or manager.command.counter is not None
        return self._step_of(manager) if known else manager.command.step

    def _is_due(self, manager: _ManagerCounts, step: int) -> bool:
        interval, seconds = manager.command.interval, time.monotonic() - manager.last_save
        if interval.seconds is not None:
            seconds = self._side.agree(seconds)  # clocks differ, but all replicas must decide the same
        return interval.is_due(step, since_step=manager.last_step, seconds=seconds)

    def _await_last(self, manager: _ManagerCounts) -> None:
        """Block until the previous save has ended; raise its error if it is the third failure in a row."""
        outcome = self._await(manager.token) if manager.token else None
        if outcome is not None and outcome.error is not None and outcome.failures >= MAX_FAILURES:
            raise outcome.error.restore()

    def _begin(
        self, manager: _ManagerCounts, number: int, metrics: Mapping[str, float] | None, *, is_last: bool = False
    ) -> str:
        command, began = manager.command, time.perf_counter()
        self._num_saves += 1
        token = f"{self.step}.{self._num_saves}.{command.key}"
        if not is_last:
            self._side.settle()
        if self._is_repeated:
            self.end_save(token, SaveOutcome())
            return token
        objects = {name: self._side.object_of(handle) for name, handle in command.objects.items()}
        gradients = {name: self._side.object_of(handle) for name, handle in command.gradients.items()}
        objects |= {name: PendingGradients(module) for name, module in gradients.items()}
        objects |= {name: SavedRows(self._side.object_of(handle)) for name, handle in command.rows.items()}
        modules = {name: obj for name, obj in objects.items() if isinstance(obj, nn.Module)}
        self._side.copy(token, command.terms, objects, modules)
        positions, copy_s = self._side.positions(), time.perf_counter() - began
        requested = RequestedSave(token, command.key, number, manager.calls, metrics, positions, copy_s, is_last)
        records = self._side.take_records()
        with self._changed:
            self._outcomes.pop(token, None)  # of a save that was under way when the run began again
            self._records[token] = records
            self._requested[token] = requested
        return token

    def _await(self, token: str, timeout_s: float | None = None) -> SaveOutcome | None:
        with self._changed:
            self._changed.wait_for(lambda: token in self._outcomes, self._limit_s if timeout_s is None else timeout_s)
            return self._outcomes.get(token)

    def report(self, *, ended: bool) -> LoopReport:
        """Return the requested saves and the counts. Thread-safe."""
        with self._changed:
            counts = {key: LoopCount(each.calls, each.last_step) for key, each in self._managers.items()}
            return LoopReport(tuple(self._requested.values()), counts, ended)

    def take_records(self, token: str) -> tuple[Record, ...] | None:
        """Return the summaries up to a save, once; None before the save has begun on this replica. Thread-safe."""
        with self._changed:
            return self._records.pop(token, None)

    def end_save(self, token: str, outcome: SaveOutcome) -> None:
        """Record that a save has completed or failed. Thread-safe."""
        with self._changed:
            self._requested.pop(token, None)
            self._outcomes[token] = outcome
            self._changed.notify_all()


_KEPT = 4  # runs that the driver may still ask for


@final
class ReplicaLoops:
    """The current run and the latest ones. A control thread calls the methods that take a run's number."""

    def __init__(self, writer: ShardWriter) -> None:
        self._writer = writer
        self._lock = threading.Lock()
        self._current: ReplicaLoop | None = None
        self._known: OrderedDict[int, ReplicaLoop] = OrderedDict()
        self._last_ended = -1  # runs up to this number have ended

    @contextlib.contextmanager
    def running(self, step: int, command: LoopCommand, side: ReplicaSide) -> Iterator[ReplicaLoop]:
        """Track a run that draws batches itself during the `with` block."""
        loop = ReplicaLoop(step, command, side)
        with self._lock:
            self._current = self._known[step] = loop
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        try:
            yield loop
        finally:
            self._current = None
            self.note_ended(step)

    def note_ended(self, step: int) -> None:
        """Record that a run has ended or was refused."""
        with self._lock:
            self._last_ended = max(self._last_ended, step)

    def draw(self) -> None:
        """Call `ReplicaLoop.draw` of the current run, if there is one."""
        if self._current is not None:
            self._current.draw()

    def report(self, step: int) -> LoopReport | None:
        """Return a run's report, or None if the run has not begun."""
        with self._lock:
            loop, ended = self._known.get(step), self._last_ended >= step
        if loop is None:
            return LoopReport(ended=True) if ended else None
        return loop.report(ended=ended)

    def take_records(self, step: int, token: str) -> tuple[Record, ...] | None:
        """Return the summaries of a run up to a save, once; None before the save has begun on this replica."""
        with self._lock:
            loop, ended = self._known.get(step), self._last_ended >= step
        records = None if loop is None else loop.take_records(token)
        return () if records is None and ended else records

    def hold(self, step: int) -> int | None:
        """Block further draws of a run; return the number of draws so far, or None if the run is not in progress."""
        with self._lock:
            loop, ended = self._known.get(step), self._last_ended >= step
        return None if loop is None or ended else loop.gate.hold()

    def stop_after(self, step: int, num_draws: int | None) -> None:
        """Make a held run stop after `num_draws` draws; None lets the run continue."""
        loop = self._known.get(step)
        if loop is not None and num_draws is not None:
            loop.gate.stop_after(num_draws)
        elif loop is not None:
            loop.gate.go_on()

    def write(self, request: ShardRequest) -> None:
        """Write shards that were copied, or will be copied soon."""
        self._writer.write(request)

    def end_save(self, step: int, token: str, outcome: SaveOutcome) -> None:
        """Record that a save of a run has completed or failed."""
        loop = self._known.get(step)
        if loop is not None:
            loop.end_save(token, outcome)
