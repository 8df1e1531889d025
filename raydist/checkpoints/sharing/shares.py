"""Division of a checkpoint's tensors into files of replicas, by rules that all replicas know. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from raydist.checkpoints.manifest import SavedObject
from raydist.checkpoints.new_files import NewFiles
from raydist.checkpoints.tensor_file import MAX_PART_BYTES, TensorFile, plan_parts

__all__ = ["UNDIVIDED_BYTES", "PlannedFile", "Share", "ShareRequest", "ShareTerms", "join_shares", "plan_files"]

UNDIVIDED_BYTES = 32 << 20  # one replica writes such an object faster than replicas can agree on more files


@final
@dataclass(frozen=True, slots=True)
class ShareRequest:
    """A save that replicas take part in.

    Attributes:
        token: Unique id of the save.
        new: Directory and names of the files.
        stems: File name stem of each object.
        whole: Objects that the first replica writes alone, because only its state is complete.
        small_bytes: Size up to which an object is not divided.
        alone: By name of a metric, the number of items in its lists that the first replica has from the driver.
    """

    token: str
    new: NewFiles
    stems: Mapping[str, str]
    whole: frozenset[str] = frozenset()
    small_bytes: int = UNDIVIDED_BYTES
    alone: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def terms(self) -> ShareTerms:
        """The part that must be known before a share is copied."""
        return ShareTerms(self.whole, self.small_bytes, self.alone)

    def file_name(self, owner: str, number: int, count: int) -> str:
        """Return the name of one of an object's files."""
        stem = self.stems[owner]
        if count == 1:
            return self.new.named(stem, ".safetensors")
        return self.new.part_named(stem, number, count)


@final
@dataclass(frozen=True, slots=True)
class ShareTerms:
    """The settings that replicas need to copy their shares.

    Attributes:
        whole: See :class:`ShareRequest`.
        small_bytes: See :class:`ShareRequest`.
        alone: See :class:`ShareRequest`.
    """

    whole: frozenset[str] = frozenset()
    small_bytes: int = UNDIVIDED_BYTES
    alone: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file of an object.

    Attributes:
        owner: Name of the object.
        number: Index among the object's files.
        count: Number of the object's files.
        keys: Names of the tensors in the file.
        rank: Rank that writes the file.
    """

    owner: str
    number: int
    count: int
    keys: tuple[str, ...]
    rank: int

    def name(self, request: ShareRequest) -> str:
        """Return the file's name."""
        return request.file_name(self.owner, self.number, self.count)


@final
@dataclass(frozen=True, slots=True)
class Share:
    """The part of a save that one replica has written.

    Attributes:
        files: Files by object name and index.
        objects: Entries without tensors, which are equal on all replicas; set by the first replica.
        random: States of the random generators of the CPU and of the replica's device.
        copy_s: Seconds for which the replica paused.
        entries: For optimizers whose states are on servers: state that is not tensors, by parameter.
    """

    files: Mapping[tuple[str, int], TensorFile]
    objects: Mapping[str, SavedObject] = field(default_factory=dict)
    random: tuple[bytes, ...] = ()
    copy_s: float = 0.0
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


def join_shares(shares: Sequence[Share]) -> dict[str, tuple[SavedObject, list[TensorFile]]]:
    """Return the entry and all files, in order, of each object."""
    files = {place: file for share in shares for place, file in share.files.items()}
    joined: dict[str, tuple[SavedObject, list[TensorFile]]] = {}
    for name, saved in shares[0].objects.items():
        own = [files[place] for place in sorted(place for place in files if place[0] == name)]
        entries = {key: each for share in shares for key, each in share.entries.get(name, {}).items()}
        joined[name] = replace(saved, values={**entries, **saved.values}) if entries else saved, own
    return joined


def random_values(shares: Sequence[Share]) -> list[Any]:
    """Return the states of all replicas' random generators for a manifest; empty if they are not known."""
    return [list(share.random) for share in shares if share.random]
