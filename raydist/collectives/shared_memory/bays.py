"""Reductions of medium tensors among many ranks: each brings all it has, a few reduce a slice each, all read the sum.

Where every rank reduces a slice, sixty-four ranks pass 64 KB in four thousand pieces, and meet three times. There ranks
outnumber cores, so that a meeting costs each of them a turn on a core: here all meet once, and wait once more.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from raydist.collectives.reducing import reduce_rows
from raydist.collectives.shared_memory.board import Count
from raydist.collectives.shared_memory.generation import SharedGeneration
from raydist.collectives.shared_memory.layout import cut
from raydist.collectives.shared_memory.sequence import BayUse
from raydist.collectives.shared_memory.task import Reached, Steps
from raydist.collectives.wire import Staged
from raydist.values import ReduceOp

__all__ = ["SMALL_BYTES", "num_reducers", "reduce_in_bays"]

SMALL_BYTES = 2 << 10
"""Up to here each of many ranks reduces all of it: that takes less time than a second meeting."""
_SLICE_BYTES = 16 << 10


@functools.lru_cache(maxsize=256)  # a program repeats a few sizes
def num_reducers(num_bytes: int, world_size: int) -> int:
    """How many ranks share the reduction of so many bytes.

    >>> num_reducers(64 << 10, 64), num_reducers(3000, 64)
    (4, 1)
    """
    return min(world_size, max(1, -(-num_bytes // _SLICE_BYTES)))


def reduce_in_bays(
    generation: SharedGeneration, bay: BayUse, flat: torch.Tensor, staged: Staged, op: ReduceOp, *, everywhere: bool
) -> Steps:
    """Reduce what all ranks have brought; `everywhere`: whether this rank wants the result.

    Args:
        generation: Of the group.
        bay: Where it lies.
        flat: What this rank has brought: the values of `staged`, as one row.
        staged: The same, to be delivered in the end.
        op: How.
        everywhere: See above.
    """
    board, first = generation.board, generation.board.layout.bay(0, bay.number)
    if board.rank < bay.num_reducers:
        _reduce_slice(generation, bay, flat, op)
        board.reach(Count.SUMMED, bay.number + 1, among=bay.num_reducers)
    yield Reached(board, Count.SUMMED, bay.number + 1, last=True, among=bay.num_reducers)
    if everywhere:
        ctypes.memmove(flat.data_ptr(), generation.segment.address + first, flat.nbytes)
    staged.deliver()


def _reduce_slice(generation: SharedGeneration, bay: BayUse, flat: torch.Tensor, op: ReduceOp) -> None:
    """Put this rank's slice of the result where the first rank has brought its own: nobody else reads that."""
    layout, size = generation.board.layout, flat.element_size()
    (window,) = cut(flat.numel(), size, chunk_bytes=1 << 62, world_size=bay.num_reducers)
    start, count = window.slice_of(generation.board.rank)
    if count:
        first = layout.bay(0, bay.number)
        rows = generation.stacked(first + start * size, layout.bay(1, bay.number) - first, count, flat.dtype)
        rows[0].copy_(reduce_rows(rows, op))
