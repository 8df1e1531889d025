"""Shards: the parts of a save that replicas or parameter servers copy between two steps, and then write in threads."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import nn

from raydist.actors.portable_errors import PortableError
from raydist.actors.supervision import root_cause
from raydist.checkpoints.capture import CapturedObject, StagingBuffers, captured_object
from raydist.checkpoints.manifest import SavedObject
from raydist.checkpoints.object_state import class_of_state, kind_of_state, state_of
from raydist.checkpoints.tensor_file import MAX_PART_BYTES, NewFiles, TensorFile, plan_parts, write_tensor_file
from raydist.core.errors import DeadlineExceededError
from raydist.parameter_servers.sharded_embedding import SavedRows
from raydist.utils.sharded_tensors import whole

UNDIVIDED_BYTES = 32 << 20  # one replica writes such an object faster than replicas can agree on more files


@final
@dataclass(frozen=True, slots=True)
class ShardTerms:
    """The settings that replicas need to copy their shards."""

    # objects that the first replica writes alone, because only its state is complete
    whole: frozenset[str] = frozenset()
    small_bytes: int = UNDIVIDED_BYTES  # size up to which an object is not divided
    # by name of a metric, the number of items in its lists that the first replica has from the driver
    driver_items: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class ShardRequest:
    """A save that replicas take part in."""

    token: str  # unique id of the save
    new: NewFiles  # directory and names of the files
    stems: Mapping[str, str]  # file name stem of each object
    terms: ShardTerms = ShardTerms()  # the settings

    def file_name(self, owner: str, number: int, count: int) -> str:
        """Return the name of one of an object's files."""
        stem = self.stems[owner]
        if count == 1:
            return self.new.named(stem, ".safetensors")
        return self.new.part_named(stem, number, count)


@final
@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file of an object."""

    owner: str  # name of the object
    number: int  # index among the object's files
    count: int  # number of the object's files
    keys: tuple[str, ...]  # names of the tensors in the file
    rank: int  # rank that writes the file


@final
@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a save that one replica has written."""

    files: Mapping[tuple[str, int], TensorFile]  # files by object name and index
    # entries without tensors, which are equal on all replicas; set by the first replica
    objects: Mapping[str, SavedObject] = field(default_factory=dict)
    random: tuple[bytes, ...] = ()  # states of the random generators of the CPU and of the replica's device
    # what is not tensors, of optimizers whose states are on servers, by parameter; of rows of embedding tables, by part
    entries: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def plan_files(
    sizes: Mapping[str, Mapping[str, int]],
    num_replicas: int,
    whole: Collection[str] = (),
    small_bytes: int = UNDIVIDED_BYTES,
    max_part_bytes: int = MAX_PART_BYTES,
) -> list[PlannedFile]:
    """Plan files for tensors, given the bytes of each, so that each replica writes about as many bytes.

    The first replica writes the objects of `whole` alone.

    >>> sizes = {"model": {"a": 40, "b": 40}, "optimizer": {"a": 10}}
    >>> [(file.owner, file.number, file.keys, file.rank) for file in plan_files(sizes, 2, small_bytes=20)]
    [('model', 0, ('a',), 0), ('model', 1, ('b',), 1), ('optimizer', 0, ('a',), 0)]
    """
    files: list[PlannedFile] = []
    load = [0] * num_replicas
    for owner, tensors in sizes.items():
        total = sum(tensors.values())
        divided = owner not in whole and total > small_bytes
        most = min(max_part_bytes, math.ceil(total / num_replicas)) if divided else max_part_bytes
        parts = plan_parts(tensors, most) if tensors else []
        for number, keys in enumerate(parts):
            rank = 0 if owner in whole else load.index(min(load))
            load[rank] += sum(tensors[key] for key in keys)
            files.append(PlannedFile(owner, number, len(parts), tuple(keys), rank))
    return files


def join_shards(shards: Sequence[Shard]) -> dict[str, tuple[SavedObject, list[TensorFile]]]:
    """Return the entry and all files, in order, of each object."""
    files = {place: file for shard in shards for place, file in shard.files.items()}
    joined: dict[str, tuple[SavedObject, list[TensorFile]]] = {}
    for name, saved in shards[0].objects.items():
        own = [files[place] for place in sorted(place for place in files if place[0] == name)]
        entries = {key: each for shard in shards for key, each in shard.entries.get(name, {}).items()}
        joined[name] = replace(saved, values={**entries, **saved.values}) if entries else saved, own
    return joined


_SHORTEST_S, _LONGEST_S = 0.005, 0.1  # between two polls
_GRACE_S = 1.0  # after a first failure: time for the other replicas to report the cause


@final
class DispatchedSave:
    """A save whose shards replicas copy after the work dispatched before, and then write.

    `ask` returns the progress of the save on each replica; thread-safe.
    """

    def __init__(self, ask: Callable[[], Sequence[Shard | PortableError | None]], limit_s: float) -> None:
        self._ask = ask
        self._limit_s = limit_s
        self.is_done = False
        """True once a caller of `wait` has returned or failed."""

    def wait(self) -> Sequence[Shard]:
        """Block until all replicas have written; return their shards in rank order. Raise the cause of a failure."""
        try:
            return self._wait()
        finally:
            self.is_done = True

    def _wait(self) -> Sequence[Shard]:
        end, pause_s, failed_at = time.monotonic() + self._limit_s, _SHORTEST_S, 0.0
        while True:
            answers = self._ask()
            shards = [each for each in answers if isinstance(each, Shard)]
            if len(shards) == len(answers):
                return shards
            failures = [each for each in answers if isinstance(each, PortableError)]
            now = time.monotonic()
            failed_at = failed_at or (now if failures else 0.0)
            if failures and (len(failures) + len(shards) == len(answers) or now > failed_at + _GRACE_S):
                raise root_cause([each.restore() for each in failures])
            if now > end:
                raise DeadlineExceededError(
                    f"A save must be written within {self._limit_s:g} s, but {len(answers) - len(shards)} of "
                    f"{len(answers)} replicas have not. Raise Timeouts.step_s."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)


_KEPT = 4  # reports to keep for saves that have not been asked about yet


@final
class SaveReports:
    """The saves of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcomes: OrderedDict[str, Shard | Exception] = OrderedDict()
        self._threads: list[threading.Thread] = []

    def write(self, token: str, do: Callable[[], Shard]) -> None:
        """Run `do` in a thread; its result or error becomes the outcome of the save."""

        def write() -> None:
            try:
                self.record(token, do())
            except Exception as error:
                self.record(token, error)

        thread = threading.Thread(target=write, name="raydist-shard", daemon=True)
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        thread.start()

    def record(self, token: str, outcome: Shard | Exception) -> None:
        """Record the outcome of a save."""
        with self._lock:
            self._outcomes[token] = outcome
            while len(self._outcomes) > _KEPT:
                self._outcomes.popitem(last=False)

    def of(self, token: str) -> Shard | Exception | None:
        """Return the outcome of a save, or None while it is unknown."""
        with self._lock:
            return self._outcomes.get(token)

    def close(self, within_s: float) -> None:
        """Block for up to `within_s` seconds until running writes have ended."""
        end = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))


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
        if not values:
            return dict(tensors)
        found = {key: values.get(tensor.data_ptr(), tensor) for key, tensor in tensors.items()}
        return {key: found[key] if found[key].shape == each.shape else each for key, each in tensors.items()}


Merge = Callable[[Mapping[str, Any], Mapping[str, Mapping[str, int]]], MergedStates]
"""Given objects and `ShardTerms.driver_items`, returns the merged states. All replicas call it together."""


@final
@dataclass(frozen=True, slots=True)
class _CopiedShard:
    """A shard in memory: values that are not tensors, planned files with their tensors, random states, rows."""

    objects: Mapping[str, SavedObject]
    files: Sequence[tuple[PlannedFile, Mapping[str, torch.Tensor]]]
    random: tuple[bytes, ...]
    rows: Mapping[str, CapturedObject]  # this replica's rows of embedding tables


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
        """Copy this replica's shard between two steps, and begin to write it. Errors are returned by `report`."""
        self.copy(request.token, request.terms, objects, modules)
        self.write(request)

    def copy(self, token: str, terms: ShardTerms, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
        """Copy this replica's shard, to be written by `write`. Errors are returned by `report`."""
        merged = self._merged(terms, objects)  # a failure here occurs on all replicas: it becomes the step's error
        try:
            rows = {name: self._own_rows(name, obj) for name, obj in objects.items() if isinstance(obj, SavedRows)}
            others = {name: obj for name, obj in objects.items() if name not in rows}
            saved, files = self._copied(terms, others, modules, merged)
            saved |= {name: replace(each.saved, values={}) for name, each in rows.items()}
            copied = _CopiedShard(saved if self._rank == 0 else {}, files, self._random(), rows)
        except Exception as error:
            self._reports.record(token, error)
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
            for name, found in copied.rows.items():
                file_name = request.file_name(name, self._rank, self._num_replicas)
                tensors = {key: torch.as_tensor(each) for key, each in found.tensors.items()}
                written[name, self._rank] = write_tensor_file(request.new, file_name, tensors)
            self._staged.give_back(
                {(file.owner, key): each for file, tensors in copied.files for key, each in tensors.items()}
            )
            entries = {name: found.saved.values for name, found in copied.rows.items()}
            return Shard(written, copied.objects, copied.random, entries)

        self._reports.write(request.token, write)

    def _merged(self, terms: ShardTerms, objects: Mapping[str, Any]) -> MergedStates:
        if self._merge is None or self._num_replicas == 1:
            return MergedStates()
        return self._merge(objects, terms.driver_items)

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
        mine = []
        for file in plan_files(sizes, self._num_replicas, terms.whole, terms.small_bytes):
            values = tensors[file.owner]
            if file.rank == self._rank:
                mine.append((file, {key: self._staged.copy(file.owner, key, whole(values[key])) for key in file.keys}))
            else:  # all replicas take part in gathering a sharded tensor
                for key in file.keys:
                    whole(values[key])
        return saved, mine

    def _own_rows(self, name: str, rows: SavedRows) -> CapturedObject:
        return captured_object(name, kind_of_state(rows), class_of_state(rows), rows.part(self._rank), copy=False)

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
