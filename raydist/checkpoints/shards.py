"""The parts of a save that replicas or parameter servers write: division into files, progress, and results."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from raydist.actors.portable_errors import PortableError
from raydist.actors.supervision import root_cause
from raydist.checkpoints.manifest import SavedObject
from raydist.checkpoints.tensor_file import MAX_PART_BYTES, NewFiles, TensorFile, plan_parts
from raydist.errors import DeadlineExceededError

__all__ = [
    "DispatchedSave",
    "PlannedFile",
    "SaveReports",
    "Shard",
    "ShardRequest",
    "ShardTerms",
    "UNDIVIDED_BYTES",
    "join_shards",
    "plan_files",
]

UNDIVIDED_BYTES = 32 << 20  # one replica writes such an object faster than replicas can agree on more files


@final
@dataclass(frozen=True, slots=True)
class ShardTerms:
    """The settings that replicas need to copy their shards."""

    # objects that the first replica writes alone, because only its state is complete
    whole: frozenset[str] = frozenset()
    small_bytes: int = UNDIVIDED_BYTES  # size up to which an object is not divided
    # by name of a metric, the number of items in its lists that the first replica has from the driver
    alone: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


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
    copy_s: float = 0.0  # seconds for which the replica paused
    # for optimizers whose states are on servers: state that is not tensors, by parameter
    entries: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def plan_files(
    sizes: Mapping[str, Mapping[str, int]],
    num_replicas: int,
    whole: Collection[str] = (),
    small_bytes: int = UNDIVIDED_BYTES,
    max_part_bytes: int = MAX_PART_BYTES,
) -> list[PlannedFile]:
    """Plan files for all tensors so that replicas write about the same number of bytes each.

    Args:
        sizes: Bytes of each tensor of each object.
        num_replicas: Number of replicas that write.
        whole: Objects that the first replica writes alone.
        small_bytes: Size up to which an object is not divided.
        max_part_bytes: Maximum bytes of tensors in one file.

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


def random_values(shards: Sequence[Shard]) -> list[Any]:
    """Return the states of all replicas' random generators for a manifest; empty if they are not known."""
    return [list(shard.random) for shard in shards if shard.random]


_SHORTEST_S, _LONGEST_S = 0.005, 0.1  # between two polls
_GRACE_S = 1.0  # after a first failure: time for the other replicas to report the cause


@final
class DispatchedSave:
    """A save whose shards replicas copy after the work dispatched before, and then write.

    Args:
        ask: Returns the progress of the save on each replica. Thread-safe.
        limit_s: Limit in seconds for all replicas to finish writing.
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
    """The saves of one process. Thread-safe.

    >>> reports = SaveReports()
    >>> reports.write("a", lambda: Shard({}))
    >>> reports.close(10.0)
    >>> reports.of("a"), reports.of("b")
    (Shard(files={}, objects={}, random=(), copy_s=0.0, entries={}), None)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: OrderedDict[str, Shard | Exception] = OrderedDict()
        self._threads: list[threading.Thread] = []

    def write(self, token: str, do: Callable[[], Shard]) -> None:
        """Run `do` in a thread; its result or error becomes the outcome of the save."""

        def write() -> None:
            try:
                self.tell(token, do())
            except Exception as error:
                self.tell(token, error)

        thread = threading.Thread(target=write, name="raydist-shard", daemon=True)
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        thread.start()

    def tell(self, token: str, outcome: Shard | Exception) -> None:
        """Record the outcome of a save."""
        with self._lock:
            self._told[token] = outcome
            while len(self._told) > _KEPT:
                self._told.popitem(last=False)

    def of(self, token: str) -> Shard | Exception | None:
        """Return the outcome of a save, or None while it is unknown."""
        with self._lock:
            return self._told.get(token)

    def close(self, within_s: float) -> None:
        """Block for up to `within_s` seconds until running writes have ended."""
        end = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
