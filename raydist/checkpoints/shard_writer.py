"""A replica's half of a save: copy a shard between two steps, and write the shard in a thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn

from raydist.checkpoints.capture import StagingBuffers, captured_object
from raydist.checkpoints.manifest import SavedObject
from raydist.checkpoints.object_state import class_of_state, kind_of_state, state_of
from raydist.checkpoints.shards import PlannedFile, SaveReports, Shard, ShardRequest, ShardTerms, plan_files
from raydist.checkpoints.tensor_file import write_tensor_file

__all__ = ["MergedStates", "ShardWriter", "begin_shard"]


@final
@dataclass(frozen=True, slots=True)
class MergedStates:
    """The merged values of states that differ between replicas."""

    # entries of metrics' states, by name of the metric
    metrics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    buffers: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()  # pairs of this replica's tensor and the merged value
    # pairs of the attributes of a metric inside a module and the entries of its state
    nested: tuple[tuple[dict[str, Any], Mapping[str, Any]], ...] = ()

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Give metrics inside modules the merged states for the `with` block, so that `state_dict` returns them."""
        own = [{name: held[name] for name in entries} for held, entries in self.nested]
        try:
            for held, entries in self.nested:
                held.update(entries)
            yield
        finally:
            for (held, _), before in zip(self.nested, own, strict=True):
                held.update(before)

    def within(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a state with merged buffers. Buffers in a state are detached, so they are found by their address."""
        values = {own.data_ptr(): value for own, value in self.buffers if own.numel()}
        found = {key: values.get(tensor.data_ptr(), tensor) for key, tensor in tensors.items()}
        return {key: found[key] if found[key].shape == each.shape else each for key, each in tensors.items()}


Merge = Callable[[Mapping[str, Any], Mapping[str, Mapping[str, int]]], MergedStates]
"""Given objects and `ShardTerms.alone`, returns the merged states. All replicas call it together."""


@final
@dataclass(frozen=True, slots=True)
class _CopiedShard:
    """A shard in memory: values that are not tensors, planned files with their tensors, random states, copy time."""

    objects: Mapping[str, SavedObject]
    files: Sequence[tuple[PlannedFile, Mapping[str, torch.Tensor]]]
    random: tuple[bytes, ...]
    copy_s: float


@final
class ShardWriter:
    """The saves of one replica, which writes a shard of each."""

    def __init__(self, rank: int, num_replicas: int, device: torch.device, merge: Merge | None = None) -> None:
        self._merge = merge
        self._rank, self._num_replicas, self._device = rank, num_replicas, device
        self._reports = SaveReports()
        self._staged = StagingBuffers()
        self._lock = threading.Lock()
        self._copies: dict[str, _CopiedShard] = {}  # not written yet
        self._requests: dict[str, ShardRequest] = {}  # not copied yet

    def begin(self, request: ShardRequest, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
        """Copy this replica's shard and begin to write it. Errors are returned by `report`."""
        self.copy(request.token, request.terms, objects, modules)
        self.write(request)

    def copy(self, token: str, terms: ShardTerms, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
        """Copy this replica's shard, to be written by `write`. Errors are returned by `report`."""
        began = time.perf_counter()
        merged = self._merged(terms, objects)  # a failure here occurs on all replicas: it becomes the step's error
        try:
            saved, files = self._copied(terms, objects, modules, merged)
            copied = _CopiedShard(saved if self._rank == 0 else {}, files, self._random(), time.perf_counter() - began)
        except Exception as error:
            self._reports.tell(token, error)
            return
        with self._lock:
            self._copies[token] = copied
            request = self._requests.pop(token, None)
        if request is not None:
            self.write(request)

    def write(self, request: ShardRequest) -> None:
        """Begin to write a shard that was copied, or will be copied. Thread-safe."""
        with self._lock:
            copied = self._copies.pop(request.token, None)
            if copied is None and self._reports.of(request.token) is None:
                self._requests[request.token] = request
        if copied is not None:
            self._start(request, copied)

    def _start(self, request: ShardRequest, copied: _CopiedShard) -> None:
        def write() -> Shard:
            written = {
                (file.owner, file.number): write_tensor_file(
                    request.new, request.file_name(file.owner, file.number, file.count), tensors
                )
                for file, tensors in copied.files
            }
            self._staged.give_back(
                {(file.owner, key): each for file, tensors in copied.files for key, each in tensors.items()}
            )
            return Shard(written, copied.objects, copied.random, copied.copy_s)

        self._reports.write(request.token, write)

    def _merged(self, terms: ShardTerms, objects: Mapping[str, Any]) -> MergedStates:
        if self._merge is None or self._num_replicas == 1:
            return MergedStates()
        return self._merge(objects, terms.alone)

    def _copied(
        self,
        terms: ShardTerms,
        objects: Mapping[str, Any],
        modules: Mapping[str, nn.Module],
        merged: MergedStates,
    ) -> tuple[dict[str, SavedObject], list[tuple[PlannedFile, dict[str, torch.Tensor]]]]:
        saved: dict[str, SavedObject] = {}
        tensors: dict[str, Mapping[str, torch.Tensor]] = {}
        for name, obj in objects.items():
            kind = kind_of_state(obj)
            with merged.shown():
                state = state_of(obj, modules)
            if name in merged.metrics:
                state = {**state, **merged.metrics[name]}
            found = captured_object(name, kind, class_of_state(obj), state, copy=False)
            saved[name], tensors[name] = found.saved, merged.within(found.tensors)
        sizes = {name: {key: each.nbytes for key, each in found.items()} for name, found in tensors.items()}
        mine = [
            each
            for each in plan_files(sizes, self._num_replicas, terms.whole, terms.small_bytes)
            if each.rank == self._rank
        ]
        copied = self._staged.copy
        return saved, [
            (file, {key: copied(file.owner, key, tensors[file.owner][key]) for key in file.keys}) for file in mine
        ]

    def _random(self) -> tuple[bytes, ...]:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return tuple(state.numpy().tobytes() for state in states)

    def set_random(self, states: Sequence[bytes]) -> None:
        """Set the random generators to the states of `Shard.random`."""
        tensors = [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in states]
        torch.set_rng_state(tensors[0])
        if self._device.type == "cuda" and len(tensors) > 1:
            torch.cuda.set_rng_state(tensors[1], self._device)

    def report(self, token: str) -> Shard | Exception | None:
        """Return the outcome of a save, or None while it is unknown. Thread-safe."""
        return self._reports.of(token)

    def close(self, within_s: float) -> None:
        """Block for up to `within_s` seconds until running writes have ended."""
        self._reports.close(within_s)


def begin_shard(
    writer: ShardWriter, request: ShardRequest, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]
) -> None:
    """Begin a save on a replica. Replicas run this function between two steps."""
    writer.begin(request, objects, modules)
