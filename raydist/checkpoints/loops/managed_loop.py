"""A manager's part in a run that draws batches itself: its order for the replicas, and the writing of saves."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, final

from torch import nn

from raydist.actors.portable_errors import pack_error
from raydist.checkpoints.capture import Capture, CapturedObject, captured_object, file_stems
from raydist.checkpoints.loops.orders import IteratorPlace, LoopCount, ManagerOrder, SaveOutcome, WantedSave
from raydist.checkpoints.managing.saves import ManagedSaves
from raydist.checkpoints.managing.watch import unsaved
from raydist.checkpoints.named_objects import other_names
from raydist.checkpoints.new_files import new_files
from raydist.checkpoints.pending_gradients import PendingGradients
from raydist.checkpoints.saved_kinds import class_of_state, kind_of_state
from raydist.checkpoints.sharing.shares import ShareRequest, ShareTerms
from raydist.checkpoints.sharing.started_save import DispatchedShares, StartedSave
from raydist.distributed_dataset import DistributedDataset
from raydist.errors import Preempted
from raydist.foreign_errors import as_exception
from raydist.pipelines.formats.files import shown_uri

__all__ = ["LoopShares", "ManagedLoop", "RemoteObjects"]


class RemoteObjects(Protocol):
    """Objects of a strategy on its replicas, once everything that the run uses is on its way."""

    def handle_of(self, obj: Any) -> int | None:
        """Return the handle of an object on the replicas, or None if they do not have the object."""

    def how(self, obj: Any) -> str:
        """Return how replicas save the object; see `ShareSaver.how`."""

    def items_alone(self, objects: Mapping[str, Any]) -> Mapping[str, Mapping[str, int]]:
        """Return the counts that `ShareRequest.alone` describes."""


class LoopShares(Protocol):
    """A callable that makes the replicas begin to write the states that they have copied."""

    def __call__(self, request: ShareRequest) -> DispatchedShares: ...


@final
class ManagedLoop:
    """One manager in one run. The program's thread creates the order; the thread that polls the run writes saves.

    Args:
        key: Key of the manager.
        saves: Saves of the manager.
        exit_code: Exit code of the process after a save that ends it.
        iterators: Iterators among the run's arguments, in order.
        asynchronous: Write saves while training continues.

    Attributes:
        left: Exception that ends the process, once the save for it is written.
    """

    def __init__(
        self, key: str, saves: ManagedSaves, exit_code: int, iterators: Sequence[Any], *, asynchronous: bool
    ) -> None:
        self.key = key
        self._asynchronous = asynchronous
        self._saves = saves
        self._exit_code = exit_code
        self._iterators = tuple(iterators)
        self._capture = Capture({})
        self._read: dict[str, tuple[int, Mapping[str, Any]]] = {}  # iterator that the object follows, own state
        self._terms = ShareTerms()
        self._objects: dict[str, Any] = {}
        self.left: Preempted | None = None

    def order(self, remote: RemoteObjects) -> ManagerOrder:
        """Return the order for the replicas. Copies the driver's own states, as of the beginning of the run."""
        saves = self._saves
        self._objects = named = saves.contents.named()
        self._read = {name: found for name, obj in named.items() if (found := self._followed(obj)) is not None}
        handles, gradients = self._handles(remote), self._gradients(remote)
        homes = {**{name: named[name] for name in handles}, **{name: named[name].module for name in gradients}}
        self._terms = ShareTerms(
            frozenset(name for name, obj in homes.items() if remote.how(obj) == "whole"),
            alone=remote.items_alone({name: named[name] for name in handles}),
        )
        self._capture = saves.contents.capture(copy=True, skip={*homes, *self._read})
        counter, best = saves.counter, saves.run.retention.best
        counted_by = None if counter is None else remote.handle_of(counter)
        return ManagerOrder(
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
            terms=self._terms,
            metric=None if best is None else best.metric,
            asynchronous=self._asynchronous,
        )

    def _handles(self, remote: RemoteObjects) -> dict[str, int]:
        again = other_names(self._objects)
        return {
            name: handle
            for name, obj in self._objects.items()
            if name not in again and name not in self._read and (handle := remote.handle_of(obj)) is not None
        }

    def _gradients(self, remote: RemoteObjects) -> dict[str, int]:
        return {
            name: handle
            for name, obj in self._objects.items()
            if isinstance(obj, PendingGradients) and (handle := remote.handle_of(obj.module)) is not None
        }

    def unreached(self, remote: RemoteObjects) -> list[nn.Module]:
        """Return modules of which the run uses only variables: the driver's copies of these soon become outdated."""
        modules = [obj for obj in self._saves.contents.named().values() if isinstance(obj, nn.Module)]
        return [
            module
            for module in modules
            if remote.handle_of(module) is None
            and any(remote.handle_of(each) is not None for each in (*module.parameters(), *module.buffers()))
        ]

    def _followed(self, obj: Any) -> tuple[int, Mapping[str, Any]] | None:
        """Return the index of the iterator that an object follows and the object's own state; None if there is none."""
        for number, iterator in enumerate(self._iterators):
            if obj is iterator:
                return number, {}
            if isinstance(obj, DistributedDataset) and obj._is_read_by(iterator):
                return number, obj._state_with(None)
        return None

    def write(self, wanted: WantedSave, begin: LoopShares, reason: str | None) -> SaveOutcome:
        """Write a save that the replicas have copied. Never raises; the outcome holds the error.

        Args:
            wanted: The save.
            begin: Makes the replicas write.
            reason: Reason for the end of the process, if this save is for it.
        """
        saves = self._saves
        path = saves.run.path_to(wanted.number)
        handle = saves.writer.run(path, functools.partial(self._write, wanted, begin))
        saves.note_begun(saves.last_step, wanted.copy_s)
        error = None if handle.error is None else as_exception(handle.error)
        if wanted.leaving:
            handle.was_told = handle.was_raised = True  # by the exception that ends the process
            said = f" What it reached is in {shown_uri(path)!r}." if error is None else unsaved(saves, error)
            self.left = Preempted(self._exit_code, f"This process is to end: {reason}.{said}")
        return SaveOutcome(None if error is None else pack_error(error), saves.writer.num_failures, self.left)

    def _write(self, wanted: WantedSave, begin: LoopShares) -> None:
        saves = self._saves
        kept = saves.kept(wanted.number, wanted.metrics)
        directory = saves.run.files_of(kept)
        new = new_files(directory)
        stems = file_stems(self._objects, new)
        capture = replace(
            self._capture,
            objects={**self._capture.objects, **self._read_states(wanted.places)},
            details=saves.details_of(kept, wanted.calls),
        )
        shares = begin(ShareRequest(wanted.token, new, stems, self._terms.whole))
        saves.write(StartedSave(directory, tuple(self._objects), capture, new, shares), kept)

    def _read_states(self, places: Sequence[IteratorPlace]) -> dict[str, CapturedObject]:
        found: dict[str, CapturedObject] = {}
        for name, (number, own) in self._read.items():
            obj, place = self._objects[name], places[number]
            state = {**own, "position": None if place.ended else dict(place.state)} if own else dict(place.state)
            found[name] = captured_object(name, kind_of_state(obj), class_of_state(obj), state, copy=False)
        return found

    def follow(self, count: LoopCount) -> None:
        """Take over the counts of `save` calls after the end of the run."""
        self._saves.calls, self._saves.last_step = count.calls, count.last_step
