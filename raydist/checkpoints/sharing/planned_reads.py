"""Which replica reads which bytes of a checkpoint: each about as many, and none twice. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from raydist.checkpoints.tensor_file import TensorFile

__all__ = ["PlannedRead", "plan_reads"]


@final
@dataclass(frozen=True, slots=True)
class PlannedRead:
    """What one replica reads of one file.

    Attributes:
        owner: The object that the tensors are for.
        file: That.
        keys: Of the tensors, or of those of which the file has rows; none of a file that has none (an index).
    """

    owner: str
    file: TensorFile
    keys: tuple[str, ...]


def plan_reads(files: Mapping[str, Sequence[TensorFile]], num_replicas: int) -> list[list[PlannedRead]]:
    """By rank what each reads: stretches of files behind each other, as they lie.

    A tensor, or a slice of one, is read by one replica: its checksum is of all of it.

    Args:
        files: Of each object.
        num_replicas: How many read.

    >>> from raydist.checkpoints.tensor_file import FilePlace
    >>> places = {key: FilePlace("U8", (4,), 8 + at, 12 + at, 0) for key, at in (("a", 0), ("b", 4))}
    >>> reads = plan_reads({"model": [TensorFile("model.safetensors", 16, 0, 8, 0, places)]}, 2)
    >>> [[read.keys for read in each] for each in reads]
    [[('a',)], [('b',)]]
    """
    total = sum(place.num_bytes for several in files.values() for file in several for place in file.tensors.values())
    reads: list[list[PlannedRead]] = [[] for _ in range(num_replicas)]
    before = 0
    for owner, several in files.items():
        for file in several:
            for rank, keys in _keys_by_rank(file, before, total, num_replicas).items():
                reads[rank].append(PlannedRead(owner, file, tuple(keys)))
            before += sum(place.num_bytes for place in file.tensors.values())
    return reads


def _keys_by_rank(file: TensorFile, before: int, total: int, num_replicas: int) -> dict[int, list[str]]:
    """Who reads what of a file that has so many bytes of tensors before it: whoever's stretch the middle is in."""
    found: dict[int, list[str]] = {}
    for key, place in file.tensors.items():
        middle = before + place.begin - file.header_bytes + place.num_bytes // 2
        found.setdefault(min(middle * num_replicas // max(1, total), num_replicas - 1), []).append(key)
    return found or {0: []}
