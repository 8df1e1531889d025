"""A replica's side of runs that draw batches themselves: count draws, copy shards for saves, and stop early.

Each draw is a step boundary. All replicas count draws and calls of `save` alike, and copy their shards at the same
boundary. During the run, the driver polls the replicas for wanted saves, writes its own states as of the beginning of
the run, and commits.
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
    IteratorPlace,
    LoopCommand,
    LoopCount,
    LoopNews,
    ManagerCommand,
    SaveOutcome,
    WantedSave,
)
from raydist.checkpoints.object_state import PendingGradients
from raydist.checkpoints.saves import MAX_FAILURES
from raydist.checkpoints.shards import ShardRequest, ShardTerms, ShardWriter
from raydist.context.replica_context import loop_here
from raydist.core.errors import DeadlineExceededError, FailedPreconditionError, Preempted
from raydist.pipelines.formats.files import shown_uri

_sending: ContextVar[bool] = ContextVar("raydist_sending_managers", default=False)


@contextlib.contextmanager
def sending_managers() -> Iterator[None]:
    """Allow managers in pickles inside the `with` block: a function that draws batches itself is pickled there."""
    token = _sending.set(True)
    try:
        yield
    finally:
        _sending.reset(token)


def may_send_managers() -> bool:
    """Return True if the current pickle goes to replicas that draw batches themselves."""
    return _sending.get()


@final
class ManagerProxy:
    """A replica's view of a manager of the driver."""

    def __init__(self, key: str) -> None:
        self._key = key

    def save(
        self,
        checkpoint_number: int | None = None,
        check_interval: bool = True,
        metrics: Mapping[str, Any] | None = None,
    ) -> Any:
        """Save as `CheckpointManager.save` does. All replicas must call it after the same draw, counted once."""
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
    """A counter of the draws in one replica's run, which can stop all replicas at the same draw.

    To stop all replicas at the same draw, the driver calls `hold` on each replica, takes the largest number returned,
    and passes it to `stop_after` on all. Replicas that have drawn fewer batches first draw up to that number, so that
    no replica waits for a peer that has stopped. A draw waits at most `limit_s` seconds for the driver's number.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._changed = threading.Condition()
        self._num_draws = 0
        self._is_held = False
        self._last: int | None = None

    def draw(self) -> bool:
        """Count a draw; return True if the replica must stop instead of drawing. Blocks while held.

        Raises:
            DeadlineExceededError: The driver did not say in time where the replicas stop.
        """
        with self._changed:
            if self._is_held and not self._changed.wait_for(self._is_decided, self._limit_s):
                raise DeadlineExceededError(
                    f"The driver must say within {self._limit_s:g} s (Timeouts.step_s) at which batch replicas "
                    "stop, and has not. It may be stuck, or overloaded."
                )
            if self._last is not None and self._num_draws >= self._last:
                return True
            self._num_draws += 1
            return False

    def _is_decided(self) -> bool:
        return not self._is_held or self._last is not None

    def hold(self) -> int:
        """Block further draws until `stop_after` or `go_on`; return the number of draws so far. Thread-safe."""
        with self._changed:
            self._is_held = True
            return self._num_draws

    def stop_after(self, num_draws: int) -> None:
        """Stop once `num_draws` draws have begun."""
        with self._changed:
            self._last = num_draws
            self._changed.notify_all()

    def go_on(self) -> None:
        """Release held draws without stopping."""
        with self._changed:
            self._is_held = False
            self._changed.notify_all()


class ReplicaSide(Protocol):
    """Operations of the replica that a run needs."""

    def object_of(self, handle: int) -> Any:
        """Return the replica's object for a handle of the driver."""

    def settle(self) -> None:
        """Synchronise what replicas agree on after a batch; the batch continues. All replicas call this together."""

    def leave(self) -> None:
        """Do the work of a run's end, because the run ends here. All replicas call this together."""

    def agree(self, number: float) -> float:
        """Return the maximum of `number` over all replicas."""

    def copy(self, token: str, terms: ShardTerms, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
        """Copy this replica's shard of a save. Errors are reported when the driver asks for the shard."""

    def places(self) -> tuple[IteratorPlace, ...]:
        """Return the positions of the run's iterators."""


@final
class LoopSave:
    """The handle of a save that replicas have asked for.

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
class _Counting:
    """The counts of a manager, continued on this replica."""

    command: ManagerCommand
    calls: int
    last_step: int | None
    last_save: float
    token: str = ""  # of the last save


@final
class ReplicaLoop:
    """One run. The run's thread draws and saves; the driver calls `news` and `end_save` in another thread."""

    def __init__(self, step: int, command: LoopCommand, side: ReplicaSide) -> None:
        self.step = step
        self._side = side
        self._limit_s = command.limit_s
        now = time.monotonic()
        self._countings = {
            each.key: _Counting(each, each.count.calls, each.count.last_step, now - each.seconds)
            for each in command.managers
        }
        self.gate = DrawGate(command.limit_s)
        self._changed = threading.Condition()
        self._wanted: dict[str, WantedSave] = {}
        self._outcomes: dict[str, SaveOutcome] = {}
        self._num_saves = 0
        self._left: Preempted | None = None

    def draw(self) -> None:
        """Pass a step boundary: called before each draw.

        Raises:
            Preempted: The process is to end, and a checkpoint of its progress is complete.
        """
        if self.gate.draw():
            self._leave()

    def _leave(self) -> None:
        if self._left is None:
            self._side.leave()
            tokens = [
                self._begin(each, self._last_step_of(each), None, leaving=True) for each in self._countings.values()
            ]
            outcomes = [self._await(token) for token in tokens]
            ends = [outcome.left for outcome in outcomes if outcome is not None and outcome.left is not None]
            self._left = ends[0] if ends else Preempted(message="This process is to end.")
        raise self._left

    def save(
        self, key: str, number: int | None = None, check_interval: bool = True, metrics: Mapping[str, Any] | None = None
    ) -> LoopSave | None:
        """Save as `CheckpointManager.save` does."""
        counting = self._counting_of(key)
        counting.calls += 1
        step = self._step_of(counting)
        if check_interval and not self._is_due(counting, step):
            return None
        number = step if number is None else number
        require_number(number)
        self._await_last(counting)
        token = self._begin(counting, number, as_metrics(metrics, counting.command.metric))
        counting.last_step, counting.last_save, counting.token = step, time.monotonic(), token
        path = checkpoint_path(counting.command.directory, f"{counting.command.name}-{number}")
        handle = LoopSave(path, lambda timeout_s: self._await(token, timeout_s))
        if not counting.command.asynchronous:
            handle.wait()
        return handle

    def _counting_of(self, key: str) -> _Counting:
        found = self._countings.get(key)
        if found is None:
            raise FailedPreconditionError(
                "A CheckpointManager must be open and watching before replicas save by it. Call its "
                "restore_or_initialize() or watch() before strategy.run."
            )
        return found

    def _step_of(self, counting: _Counting) -> int:
        if counting.command.counts_calls:
            return counting.calls
        if counting.command.counter is None:
            raise FailedPreconditionError(
                "What counts the steps of a CheckpointManager must be a variable of the strategy where replicas save, "
                "got a function, or a variable that no step has used. Give step_counter=rd.get_global_step()."
            )
        return int(self._side.object_of(counting.command.counter).item())

    def _last_step_of(self, counting: _Counting) -> int:
        """Return the step like `_step_of`, or the step at the run's beginning if only the driver counts."""
        known = counting.command.counts_calls or counting.command.counter is not None
        return self._step_of(counting) if known else counting.command.step

    def _is_due(self, counting: _Counting, step: int) -> bool:
        interval, seconds = counting.command.interval, time.monotonic() - counting.last_save
        if interval.seconds is not None:
            seconds = self._side.agree(seconds)  # clocks differ: all replicas save, or none
        return interval.is_due(step, since_step=counting.last_step, seconds=seconds)

    def _await_last(self, counting: _Counting) -> None:
        """Block until the previous write has ended; raise its error if it is the third failure in a row."""
        outcome = self._await(counting.token) if counting.token else None
        if outcome is not None and outcome.error is not None and outcome.failures >= MAX_FAILURES:
            raise outcome.error.restore()

    def _begin(
        self, counting: _Counting, number: int, metrics: Mapping[str, float] | None, *, leaving: bool = False
    ) -> str:
        command, began = counting.command, time.perf_counter()
        self._num_saves += 1
        token = f"{self.step}.{self._num_saves}.{command.key}"
        if not leaving:
            self._side.settle()
        objects = {name: self._side.object_of(handle) for name, handle in command.objects.items()}
        gradients = {name: self._side.object_of(handle) for name, handle in command.gradients.items()}
        objects |= {name: PendingGradients(module) for name, module in gradients.items()}
        modules = {name: obj for name, obj in objects.items() if isinstance(obj, nn.Module)}
        self._side.copy(token, command.terms, objects, modules)
        places, copy_s = self._side.places(), time.perf_counter() - began
        wanted = WantedSave(token, command.key, number, counting.calls, metrics, places, copy_s, leaving)
        with self._changed:
            self._wanted[token] = wanted
        return token

    def _await(self, token: str, timeout_s: float | None = None) -> SaveOutcome | None:
        with self._changed:
            self._changed.wait_for(lambda: token in self._outcomes, self._limit_s if timeout_s is None else timeout_s)
            return self._outcomes.get(token)

    def news(self, *, ended: bool) -> LoopNews:
        """Return the wanted saves and counts for the driver. Thread-safe."""
        with self._changed:
            counts = {key: LoopCount(each.calls, each.last_step) for key, each in self._countings.items()}
            return LoopNews(tuple(self._wanted.values()), counts, ended)

    def end_save(self, token: str, outcome: SaveOutcome) -> None:
        """Record that a save has completed or failed. Thread-safe."""
        with self._changed:
            self._wanted.pop(token, None)
            self._outcomes[token] = outcome
            self._changed.notify_all()


_KEPT = 4  # runs that the driver may still ask for


@final
class ReplicaLoops:
    """The current and the latest runs. Methods that take a run's number are called by the control thread."""

    def __init__(self, writer: ShardWriter) -> None:
        self._writer = writer
        self._lock = threading.Lock()
        self._current: ReplicaLoop | None = None
        self._known: OrderedDict[int, ReplicaLoop] = OrderedDict()
        self._passed = -1  # runs up to this number have ended

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
            self.pass_by(step)

    def pass_by(self, step: int) -> None:
        """Record that a run has ended or was refused."""
        with self._lock:
            self._passed = max(self._passed, step)

    def draw(self) -> None:
        """Pass a step boundary before a draw; see `ReplicaLoop.draw`."""
        if self._current is not None:
            self._current.draw()

    def news(self, step: int) -> LoopNews | None:
        """Return a run's news, or None if the run has not begun."""
        with self._lock:
            loop, ended = self._known.get(step), self._passed >= step
        if loop is None:
            return LoopNews(ended=True) if ended else None
        return loop.news(ended=ended)

    def hold(self, step: int) -> int | None:
        """Block further draws of a run; return the number of draws so far, or None if the run is not under way."""
        with self._lock:
            loop, ended = self._known.get(step), self._passed >= step
        return None if loop is None or ended else loop.gate.hold()

    def stop_after(self, step: int, num_draws: int | None) -> None:
        """Make a held run stop after so many draws; None lets the run continue."""
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
