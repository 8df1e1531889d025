"""Saves during a run whose step function draws batches itself: the driver's half.

While such a run is under way, the driver cannot call `save` between two steps. A thread polls the first replica for
saves that the step function requested, writes the driver's own states (as they were when the run began), makes the
replicas write theirs, and commits the checkpoint. On preemption the thread makes all replicas stop at the same draw.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar, TypeVarTuple, final

from torch import nn

from raydist.actors.portable_errors import PortableError, pack_error
from raydist.checkpoints.capture import Capture, CapturedObject, captured_object, file_stems
from raydist.checkpoints.checkpoint import StartedSave
from raydist.checkpoints.loop_commands import (
    IteratorPosition,
    LoopCommand,
    LoopCount,
    ManagerCommand,
    RequestedSave,
    SaveOutcome,
)
from raydist.checkpoints.object_state import PendingGradients, aliases_of, class_of_state, kind_of_state
from raydist.checkpoints.replica_loop import ReplicaLoops
from raydist.checkpoints.saves import ManagerSaves
from raydist.checkpoints.shards import DispatchedSave, Shard, ShardRequest, ShardTerms
from raydist.checkpoints.tensor_file import new_files
from raydist.checkpoints.watch import ManagerWatch, unsaved
from raydist.cluster.preemption import end_reason, step_watchers
from raydist.core.errors import Preempted
from raydist.core.exception_utils import as_exception
from raydist.core.nest import leaves_in
from raydist.distributed_dataset import DistributedDataset, DistributedIterator
from raydist.parameter_servers.sharded_embedding import SavedRows
from raydist.pipelines.formats.files import shown_uri
from raydist.summary.record import Record
from raydist.summary.writer import flush_writers

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

_POLL_S = 0.05  # between two polls of the first replica, each of which costs 1 ms of the replica's CPU time


class LoopHost(Protocol):
    """A strategy whose replicas draw batches themselves."""

    @property
    def limit_s(self) -> float:
        """Limit in seconds of a step, and of a save."""

    def ask(self, rank: int | None, method: Callable[[ReplicaLoops, *_Args], _T], *args: *_Args) -> list[_T]:
        """Call a method on one replica or all, concurrently with their steps; return the results. Thread-safe."""

    def shards(self, step: int, token: str) -> Sequence[Shard | PortableError | None]:
        """Return the progress of a save on each replica. Thread-safe."""

    def take_records(self, by_replica: Sequence[Sequence[Record]]) -> None:
        """Give the summaries that all replicas have recorded up to a save to their writers. Thread-safe."""

    def drain(self) -> None:
        """Block until all dispatched work has ended; raise its errors. Called by the program's threads."""

    def handle_of(self, obj: Any) -> int | None:
        """Return the handle of an object on the replicas, or None if they do not have the object."""

    def save_mode(self, obj: Any) -> str:
        """Return how replicas save the object; see `ShardSaver.save_mode`."""

    def driver_items(self, objects: Mapping[str, Any]) -> Mapping[str, Mapping[str, int]]:
        """Return the counts that `ShardTerms.driver_items` describes."""


@final
class ManagedLoop:
    """One manager in one run. The program's thread calls `command`; the polling thread calls `write`.

    Attributes:
        preempted: Exception that ends the process, once the save before preemption is written.
    """

    def __init__(
        self, key: str, saves: ManagerSaves, exit_code: int, iterators: Sequence[Any], *, asynchronous: bool
    ) -> None:
        self.key = key
        self._asynchronous = asynchronous
        self._saves = saves
        self._exit_code = exit_code
        self._iterators = tuple(iterators)
        self._capture = Capture({})
        # Datasets and iterators that have the position of an iterator of the run, by name: the index of that iterator,
        # and the object's state without the position.
        self._positioned: dict[str, tuple[int, Mapping[str, Any]]] = {}
        self._terms = ShardTerms()
        self._objects: dict[str, Any] = {}
        self.preempted: Preempted | None = None

    def command(self, remote: LoopHost) -> ManagerCommand:
        """Return the command for the replicas. Copies the driver's own states, as of the beginning of the run."""
        saves = self._saves
        self._objects = named = saves.contents.named()
        self._positioned = {name: found for name, obj in named.items() if (found := self._iterator_of(obj)) is not None}
        handles, gradients = self._handles(remote), self._homes(remote, PendingGradients)
        rows = self._homes(remote, SavedRows)
        homes = {**{name: named[name] for name in handles}, **{name: named[name].module for name in gradients}}
        self._terms = ShardTerms(
            frozenset(name for name, obj in homes.items() if remote.save_mode(obj) == "whole"),
            driver_items=remote.driver_items({name: named[name] for name in handles}),
        )
        self._capture = saves.contents.capture(copy=True, skip={*homes, *rows, *self._positioned})
        counter, best = saves.counter, saves.run.retention.best
        counted_by = None if counter is None else remote.handle_of(counter)
        return ManagerCommand(
            key=self.key,
            directory=saves.run.path,
            name=saves.run.name,
            interval=saves.interval,
            count=LoopCount(calls=saves.calls, last_step=saves.last_step),
            seconds=time.monotonic() - saves.last_save,
            counter=counted_by,
            counts_calls=counter is None,
            step=0 if counter is None or counted_by is not None else saves.step(),
            objects=handles,
            gradients=gradients,
            rows=rows,
            terms=self._terms,
            metric=None if best is None else best.metric,
            asynchronous=self._asynchronous,
        )

    def _handles(self, remote: LoopHost) -> dict[str, int]:
        aliases = aliases_of(self._objects)
        return {
            name: handle
            for name, obj in self._objects.items()
            if name not in aliases and name not in self._positioned and (handle := remote.handle_of(obj)) is not None
        }

    def _homes(self, remote: LoopHost, kind: type[PendingGradients | SavedRows]) -> dict[str, int]:
        """Return the handles of the modules of which objects of a kind save a part, by name of the object."""
        return {
            name: handle
            for name, obj in self._objects.items()
            if isinstance(obj, kind) and (handle := remote.handle_of(obj.module)) is not None
        }

    def partly_sent(self, remote: LoopHost) -> list[nn.Module]:
        """Return modules that the replicas lack, but of which they have variables: the driver's copies become stale."""
        modules = [obj for obj in self._saves.contents.named().values() if isinstance(obj, nn.Module)]
        return [
            module
            for module in modules
            if remote.handle_of(module) is None
            and any(remote.handle_of(each) is not None for each in (*module.parameters(), *module.buffers()))
        ]

    def _iterator_of(self, obj: Any) -> tuple[int, Mapping[str, Any]] | None:
        """Return the entry of `_positioned` for an object; None if no iterator of the run gives its position."""
        for number, iterator in enumerate(self._iterators):
            if obj is iterator:
                return number, {}
            if isinstance(obj, DistributedDataset) and obj._epochs.is_read_by(iterator):
                return number, obj._epochs.state_with(None)
        return None

    def write(
        self, requested: RequestedSave, begin: Callable[[ShardRequest], DispatchedSave], reason: str | None
    ) -> SaveOutcome:
        """Write a save whose shards the replicas have copied. Never raises; the outcome holds the error.

        `begin` makes the replicas write their shards; `reason` is the reason for preemption, for the last save.
        """
        saves = self._saves
        path = saves.run.path_to(requested.number)
        handle = saves.writer.run(path, functools.partial(self._write, requested, begin))
        saves.note_begun(saves.last_step, requested.copy_s)
        error = None if handle.error is None else as_exception(handle.error)
        if requested.is_last:
            handle.was_told = handle.was_raised = True  # by the exception that ends the process
            said = f" What it reached is in {shown_uri(path)!r}." if error is None else unsaved(saves, error)
            self.preempted = Preempted(self._exit_code, f"This process is to end: {reason}.{said}")
        return SaveOutcome(None if error is None else pack_error(error), saves.writer.num_failures, self.preempted)

    def _write(self, requested: RequestedSave, begin: Callable[[ShardRequest], DispatchedSave]) -> None:
        saves = self._saves
        kept = saves.kept(requested.number, requested.metrics)
        directory = saves.run.files_of(kept)
        new = new_files(directory)
        stems = file_stems(self._objects, new)
        capture = replace(
            self._capture,
            objects={**self._capture.objects, **self._positioned_states(requested.positions)},
            details=saves.details_of(kept, requested.calls),
        )
        shards = begin(ShardRequest(requested.token, new, stems, self._terms))
        saves.write(StartedSave(directory, tuple(self._objects), capture, new, shards, flush_writers), kept)

    def _positioned_states(self, positions: Sequence[IteratorPosition]) -> dict[str, CapturedObject]:
        found: dict[str, CapturedObject] = {}
        for name, (number, own) in self._positioned.items():
            obj, position = self._objects[name], positions[number]
            state = (
                {**own, "position": None if position.ended else dict(position.state)} if own else dict(position.state)
            )
            found[name] = captured_object(name, kind_of_state(obj), class_of_state(obj), state, copy=False)
        return found

    def take_counts(self, count: LoopCount) -> None:
        """Continue the counts of `save` calls of the replicas after the end of the run."""
        self._saves.calls, self._saves.last_step = count.calls, count.last_step


@final
class DriverLoop:
    """The saves of one run. The program's thread calls `command` before it dispatches the run, and `start` after it."""

    def __init__(self, host: LoopHost, parts: Sequence[ManagedLoop]) -> None:
        self._host = host
        self._parts = {part.key: part for part in parts}
        self._step = -1
        self._has_stopped = False
        self._is_polling = False
        self._begins_again = False
        self._lock = threading.Lock()  # of the two above
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def command(self) -> LoopCommand:
        """Return the command for the replicas. Objects that the run uses must be sent, or about to be sent."""
        return LoopCommand(tuple(part.command(self._host) for part in self._parts.values()), self._host.limit_s)

    def partly_sent(self) -> list[nn.Module]:
        """Return the modules to send to the replicas for saves. Call this after the run's own objects are sent."""
        return [module for part in self._parts.values() for module in part.partly_sent(self._host)]

    def start(self, step: int) -> None:
        """Start to poll the replicas; `step` is the number under which the run was dispatched."""
        self._step = step
        self._start_polling()

    def _start_polling(self) -> None:
        self._is_polling = True
        self._thread = threading.Thread(target=self._poll_until_ended, name="raydist-loop", daemon=True)
        self._thread.start()

    def begin_again(self) -> None:
        """Poll on, because the run begins again: a replica was lost. Does nothing for a run that is settled."""
        with self._lock:
            self._begins_again = self._is_polling
            if self._thread is not None and not self._is_polling:
                self._start_polling()

    def settle(self) -> None:
        """Block until the run has ended and its saves are written; raise the run's error."""
        if self._thread is not None and self._thread is not threading.current_thread():
            try:
                self._host.drain()  # may settle this run before the process ends for a preemption
            finally:
                if (thread := self._thread) is not None:
                    thread.join()
                    self._thread = None

    def preemption_of(self, key: str) -> Preempted | None:
        """Return the exception that ends the process, once this manager's save before preemption is written."""
        return self._parts[key].preempted

    def close(self) -> None:
        """Stop polling, because the replicas are gone."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def _poll_until_ended(self) -> None:
        while not self._closed.is_set():
            try:
                has_ended = self._poll()
            except Exception:  # replicas are gone or the run failed; the caller that waits for the run gets the error
                has_ended = True
            with self._lock:
                self._is_polling = self._begins_again or not has_ended
                self._begins_again = False
                if not self._is_polling:
                    return
            self._closed.wait(_POLL_S)

    def _poll(self) -> bool:
        """Write the requested saves; return True once the run has ended."""
        if end_reason() is not None and not self._has_stopped:
            self._has_stopped = self._stop_replicas()
        (report,) = self._host.ask(0, ReplicaLoops.report, self._step)
        if report is None:
            return False
        for requested in report.requested:
            self._save(requested)
        if not report.ended or report.requested:
            return False
        for key, count in report.counts.items():
            self._parts[key].take_counts(count)
        return True

    def _stop_replicas(self) -> bool:
        """Make all replicas stop before the same draw; return False if some replica has not begun, or has ended."""
        drawn = self._host.ask(None, ReplicaLoops.hold, self._step)
        known = [num_draws for num_draws in drawn if num_draws is not None]
        last = max(known) if len(known) == len(drawn) else None
        self._host.ask(None, ReplicaLoops.stop_after, self._step, last)
        return last is not None

    def _save(self, requested: RequestedSave) -> None:
        self._host.take_records(self._records_until(requested.token))
        outcome = self._parts[requested.key].write(requested, self._begin_shards, end_reason())
        self._host.ask(None, ReplicaLoops.end_save, self._step, requested.token, outcome)

    def _records_until(self, token: str) -> list[tuple[Record, ...]]:
        """Return the summaries of each replica up to a save. Blocks until all replicas have reached the save."""
        found = self._host.ask(None, ReplicaLoops.take_records, self._step, token)
        while None in found and not self._closed.wait(_POLL_S):
            for rank, records in enumerate(found):
                if records is None:
                    (found[rank],) = self._host.ask(rank, ReplicaLoops.take_records, self._step, token)
        return [records or () for records in found]

    def _begin_shards(self, request: ShardRequest) -> DispatchedSave:
        self._host.ask(None, ReplicaLoops.write, request)
        ask = functools.partial(self._host.shards, self._step, request.token)
        return DispatchedSave(ask, self._host.limit_s)


def begin_loop(arguments: Any, host: LoopHost) -> DriverLoop | None:
    """Return the driver's half of a run; None if no argument is a distributed iterator, or no manager is watching.

    Blocks until the previous run has ended, and raises that run's error.
    """
    watchers = [each for each in step_watchers() if isinstance(each, ManagerWatch)]
    iterators = [leaf for leaf in leaves_in(arguments) if isinstance(leaf, DistributedIterator)] if watchers else []
    if not iterators:
        return None
    for watch in watchers:
        watch.settle()
    saving = [(watch, saves) for watch in watchers if (saves := watch.saves) is not None]
    parts = [
        ManagedLoop(watch.key, saves, watch.exit_code, iterators, asynchronous=watch.asynchronous)
        for watch, saves in saving
    ]
    loop = DriverLoop(host, parts)
    for watch, _ in saving:
        watch.follow(loop.settle, functools.partial(loop.preemption_of, watch.key))
    return loop
