"""Which replica writes which tensors of a checkpoint: each a share, by rules that all know. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from raydist.checkpoints.manifest import SavedObject
from raydist.checkpoints.new_files import NewFiles
from raydist.checkpoints.tensor_file import MAX_PART_BYTES, TensorFile, plan_parts

__all__ = ["UNDIVIDED_BYTES", "PlannedFile", "Share", "ShareRequest", "ShareTerms", "join_shares", "plan_files"]

UNDIVIDED_BYTES = 32 << 20  # one replica writes these in less time than it takes to agree on more files


@final
@dataclass(frozen=True, slots=True)
class ShareRequest:
    """What replicas are told of a save.

    Attributes:
        token: Tells it from others.
        new: Where files go.
        stems: What the files of each object are called.
        whole: Objects that the first replica writes alone: only there is all of them as the driver sees it.
        small_bytes: Of an object that is not divided.
        alone: By name of a metric, how many items of its lists the first replica has from the driver.
    """

    token: str
    new: NewFiles
    stems: Mapping[str, str]
    whole: frozenset[str] = frozenset()
    small_bytes: int = UNDIVIDED_BYTES
    alone: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def terms(self) -> ShareTerms:
        """What is to be known before it is copied."""
        return ShareTerms(self.whole, self.small_bytes, self.alone)

    def file_name(self, owner: str, number: int, count: int) -> str:
        """What one of the files of an object is called."""
        stem = self.stems[owner]
        if count == 1:
            return self.new.named(stem, ".safetensors")
        return self.new.part_named(stem, number, count)


@final
@dataclass(frozen=True, slots=True)
class ShareTerms:
    """What replicas must know to copy their shares.

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
    """One file.

    Attributes:
        owner: The object whose tensors are in it.
        number: Which of its files.
        count: How many these are.
        keys: Of the tensors.
        rank: Who writes it.
    """

    owner: str
    number: int
    count: int
    keys: tuple[str, ...]
    rank: int

    def name(self, request: ShareRequest) -> str:
        """What it is called."""
        return request.file_name(self.owner, self.number, self.count)


@final
@dataclass(frozen=True, slots=True)
class Share:
    """What one replica has written.

    Attributes:
        files: By object and number.
        objects: What is no tensor, and is equal on all; told by the first replica.
        random: State of its random generator, of its device and of the CPU.
        copy_s: How long its steps stood still.
        entries: Of optimizers whose states lie elsewhere than they do: by parameter, what is remembered and no tensor.
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
    """Files for all tensors, so that replicas have about equally much to write.

    Args:
        sizes: Bytes of each tensor of each object.
        num_replicas: How many write.
        whole: Objects that are the first one's.
        small_bytes: Of an object that is not divided.
        max_part_bytes: Of tensors in one file.

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
    """Each object with all of its files, in order."""
    files = {place: file for share in shares for place, file in share.files.items()}
    joined: dict[str, tuple[SavedObject, list[TensorFile]]] = {}
    for name, saved in shares[0].objects.items():
        own = [files[place] for place in sorted(place for place in files if place[0] == name)]
        entries = {key: each for share in shares for key, each in share.entries.get(name, {}).items()}
        joined[name] = replace(saved, values={**entries, **saved.values}) if entries else saved, own
    return joined


def random_values(shares: Sequence[Share]) -> list[Any]:
    """States of all replicas' random generators, as a manifest keeps them; none where they are not told."""
    return [list(share.random) for share in shares if share.random]
