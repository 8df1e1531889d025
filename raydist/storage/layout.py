"""Where variables lie in a shard. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

__all__ = ["FIRST_BYTE", "ShardLayout"]

FIRST_BYTE = 4096  # a page: what is written before the variables must not make one of theirs private
_ALIGN = 64  # bytes of a cache line; and every dtype's size divides it


@final
@dataclass(frozen=True, slots=True)
class ShardLayout:
    """A flat shard: variables one after the other.

    Attributes:
        sizes: Of each variable, in bytes.
        offsets: Of each, in bytes from the begin of the file.
        num_bytes: Of the whole file.

    >>> ShardLayout.of([8, 100, 8]).offsets
    (4096, 4160, 4288)
    """

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    num_bytes: int

    @staticmethod
    def of(sizes: Sequence[int]) -> ShardLayout:
        """The layout of variables of these sizes."""
        offsets: list[int] = []
        end = FIRST_BYTE
        for size in sizes:
            offsets.append(end)
            end += -(-size // _ALIGN) * _ALIGN
        return ShardLayout(tuple(sizes), tuple(offsets), end)
