"""What ranks have brought to a small collective: in their slots of the shared memory."""

from __future__ import annotations

import torch

from raydist.collectives.reducing import reduce_parts, reduce_rows
from raydist.collectives.shared_memory.generation import SharedGeneration
from raydist.values import ReduceOp

__all__ = ["flat_view", "reduce_slots", "slot_of"]


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as one of one dimension; a view costs a microsecond.

    >>> flat_view(torch.zeros(2, 3)).shape
    torch.Size([6])
    """
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def reduce_slots(generation: SharedGeneration, number: int, flat: torch.Tensor, op: ReduceOp) -> None:
    """Make `flat` the reduction of what all ranks have brought to a collective."""
    layout = generation.board.layout
    if not layout.bay_bytes:
        reduce_parts([slot_of(generation, rank, number, flat, 0) for rank in range(layout.world_size)], flat, op)
        return
    place, stride = layout.slot(0, number), layout.slot(1, 0) - layout.slot(0, 0)
    flat.copy_(reduce_rows(generation.stacked(place, stride, layout.world_size, flat.numel(), flat.dtype), op))


def slot_of(generation: SharedGeneration, rank: int, number: int, like: torch.Tensor, offset: int) -> torch.Tensor:
    """What a rank has brought to a collective, from this many bytes on."""
    place = generation.board.layout.slot(rank, number) + offset
    return generation.view(place, like.numel(), like.dtype)
