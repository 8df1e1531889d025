"""The offsets of variables in a shard. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

__all__ = ["FIRST_BYTE", "ShardLayout"]

FIRST_BYTE = 4096  # a page, so that writes to the header make no page of the variables private
_ALIGN = 64  # bytes of a cache line; a multiple of every dtype's size


@final
@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The layout of a shard: variables one after the other.

    Attributes:
        sizes: Size of each variable in bytes.
        offsets: Offset of each variable in bytes from the beginning of the file.
        num_bytes: Size of the file.

    >>> ShardLayout.of([8, 100, 8]).offsets
    (4096, 4160, 4288)
    """

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    num_bytes: int

    @staticmethod
    def of(sizes: Sequence[int]) -> ShardLayout:
        """Return the layout of variables of these sizes."""
        offsets: list[int] = []
        end = FIRST_BYTE
        for size in sizes:
            offsets.append(end)
            end += -(-size // _ALIGN) * _ALIGN
        return ShardLayout(tuple(sizes), tuple(offsets), end)
