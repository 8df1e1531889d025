"""A manager's part in a run that draws batches itself: what it tells the replicas, and what it writes for them."""

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
    """What a strategy's replicas have, once all that the run uses is on its way."""

    def handle_of(self, obj: Any) -> int | None:
        """What replicas know it by; None where they do not have it."""

    def how(self, obj: Any) -> str:
        """Who of them saves it; see `ShareSaver.how`."""

    def items_alone(self, objects: Mapping[str, Any]) -> Mapping[str, Mapping[str, int]]:
        """See `ShareRequest.alone`."""


class LoopShares(Protocol):
    """Begins to have the replicas write what they have copied."""

    def __call__(self, request: ShareRequest) -> DispatchedShares: ...


@final
class ManagedLoop:
    """One manager, one run. The program's thread makes the order; then the thread that watches the run writes.

    Args:
        key: Which manager.
        saves: Its saves.
        exit_code: Of the process, where that is left.
        iterators: Those of the run, in order.
        asynchronous: Whether training goes on while it writes.

    Attributes:
        left: With what the process is left, once it was.
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
        self._read: dict[str, tuple[int, Mapping[str, Any]]] = {}  # which iterator an object follows, and its own part
        self._terms = ShareTerms()
        self._objects: dict[str, Any] = {}
        self.left: Preempted | None = None

    def order(self, remote: RemoteObjects) -> ManagerOrder:
        """What replicas must know. Copies what only the driver has: that is of the run's beginning."""
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
        """Of what replicas have, once each."""
        again = other_names(self._objects)
        return {
            name: handle
            for name, obj in self._objects.items()
            if name not in again and name not in self._read and (handle := remote.handle_of(obj)) is not None
        }

    def _gradients(self, remote: RemoteObjects) -> dict[str, int]:
        """Of the modules of theirs whose gradients are to be saved."""
        return {
            name: handle
            for name, obj in self._objects.items()
            if isinstance(obj, PendingGradients) and (handle := remote.handle_of(obj.module)) is not None
        }

    def unreached(self, remote: RemoteObjects) -> list[nn.Module]:
        """Modules that the run does not use, but variables of them: what the driver has of these is soon outdated."""
        modules = [obj for obj in self._saves.contents.named().values() if isinstance(obj, nn.Module)]
        return [
            module
            for module in modules
            if remote.handle_of(module) is None
            and any(remote.handle_of(each) is not None for each in (*module.parameters(), *module.buffers()))
        ]

    def _followed(self, obj: Any) -> tuple[int, Mapping[str, Any]] | None:
        """Which of the run's iterators an object follows, and what it has beside that's place; None for none."""
        for number, iterator in enumerate(self._iterators):
            if obj is iterator:
                return number, {}
            if isinstance(obj, DistributedDataset) and obj._is_read_by(iterator):
                return number, obj._state_with(None)
        return None

    def write(self, wanted: WantedSave, begin: LoopShares, reason: str | None) -> SaveOutcome:
        """Write a save that the replicas have copied. Never raises.

        Args:
            wanted: It.
            begin: Has them write.
            reason: Why the process is to end, where it is left by this save.
        """
        saves = self._saves
        path = saves.run.path_to(wanted.number)
        handle = saves.writer.run(path, functools.partial(self._write, wanted, begin))
        saves.note_begun(saves.last_step, wanted.copy_s)
        error = None if handle.error is None else as_exception(handle.error)
        if wanted.leaving:
            handle.was_told = handle.was_raised = True  # by what ends the process
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
        """States of what follows the run's iterators."""
        found: dict[str, CapturedObject] = {}
        for name, (number, own) in self._read.items():
            obj, place = self._objects[name], places[number]
            state = {**own, "position": None if place.ended else dict(place.state)} if own else dict(place.state)
            found[name] = captured_object(name, kind_of_state(obj), class_of_state(obj), state, copy=False)
        return found

    def follow(self, count: LoopCount) -> None:
        """The run is over: so often replicas have called `save`."""
        self._saves.calls, self._saves.last_step = count.calls, count.last_step
