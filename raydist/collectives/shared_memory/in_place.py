"""Tensors that lie in a segment of their own, one copy a rank, and are reduced where they are."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import final

import torch

from raydist.collectives.folding import fold
from raydist.collectives.shared_memory.board import Board, Count
from raydist.collectives.shared_memory.layout import cut
from raydist.collectives.shared_memory.segment import Segment
from raydist.collectives.shared_memory.task import Reached, Steps
from raydist.values import ReduceOp

__all__ = ["SharedTensors", "allocation_bytes", "reduce_in_place"]

_LINE = 64
_PAGE = 4096
# Of one rank's part: parts of all ranks stay in a core's cache while they are added up and handed out.
_BLOCK_BYTES = 128 << 10


@final
class SharedTensors:
    """The tensors of a group that lie in shared memory, by where they begin."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[int, list[torch.Tensor]]] = {}
        self._num_tensors = 0

    def add(
        self, segment: Segment, sizes: Sequence[tuple[int, torch.dtype]], rank: int, world_size: int
    ) -> list[torch.Tensor]:
        """This rank's tensors in a segment of `allocation_bytes(sizes, world_size)` bytes.

        They are forgotten when they are dropped.
        """
        offsets = _offsets(sizes)
        mine = []
        for (numel, dtype), offset in zip(sizes, offsets, strict=False):
            places = [_PAGE + other * offsets[-1] + offset for other in range(world_size)]
            tensor = segment.view(places[rank], numel, dtype)
            mine.append(tensor)
            self._num_tensors += 1
            if numel:
                # Tensors of their own, not views of the one that is given away: those would keep it.
                copies = [segment.view(place, numel, dtype) for place in places]
                self._copies[tensor.data_ptr()] = (self._num_tensors, copies)
                weakref.finalize(tensor, self._copies.pop, tensor.data_ptr(), None).atexit = False
        return mine

    def find(self, tensor: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
        """The number and all ranks' copies of a tensor; 0 and none where it is not one of these, whole."""
        number, copies = self._copies.get(tensor.data_ptr(), (0, []))
        if not copies or copies[0].dtype != tensor.dtype or copies[0].numel() != tensor.numel():
            return 0, []
        return number, copies


def allocation_bytes(sizes: Sequence[tuple[int, torch.dtype]], world_size: int) -> int:
    """Bytes of a segment for these tensors, once a rank."""
    return _PAGE + world_size * _offsets(sizes)[-1]


def _offsets(sizes: Sequence[tuple[int, torch.dtype]]) -> list[int]:
    """Where each tensor of a rank begins, and the length of all."""
    offsets = [0]
    for numel, dtype in sizes:
        offsets.append(offsets[-1] + -(-numel * dtype.itemsize // _LINE) * _LINE)
    offsets[-1] = -(-offsets[-1] // _PAGE) * _PAGE
    return offsets


def reduce_in_place(board: Board, number: int, copies: Sequence[torch.Tensor], op: ReduceOp) -> Steps:
    """Reduce this rank's slice of all ranks' copies; the others do theirs."""
    rank, size = board.rank, len(copies)
    (whole,) = cut(copies[0].numel(), copies[0].element_size(), chunk_bytes=1 << 62, world_size=size)
    start, count = whole.slice_of(rank)
    block = _BLOCK_BYTES // copies[0].element_size()
    for begin in range(start, start + count, block):
        parts = [copy[begin : min(begin + block, start + count)] for copy in copies]
        # In rank order the first two are added first, so that only these may hold the result.
        result = parts[rank] if rank < 2 else torch.empty_like(parts[rank])
        fold(parts, result, op)
        for other in range(size):
            if parts[other] is not result:
                parts[other].copy_(result)
    board.reach(Count.REDUCED, number + 1)
    yield Reached(board, Count.REDUCED, number + 1, last=True)
