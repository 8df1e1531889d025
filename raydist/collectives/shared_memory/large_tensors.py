"""Collectives on tensors that do not fit into slots: they pass in windows, or lie in the memory already.

Each function here does one rank's part, and pauses where it must wait for others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from raydist.collectives.shared_memory.generation import SharedGeneration
from raydist.collectives.shared_memory.in_place import SharedTensor, reduce_in_place
from raydist.collectives.shared_memory.staging import Gather, PairReduction, Reduction, Swap
from raydist.collectives.shared_memory.task import Steps
from raydist.collectives.wire import Staged
from raydist.values import ReduceOp

__all__ = ["gather_large", "reduce_large", "scatter_large", "swap_large"]


def reduce_large(
    generation: SharedGeneration,
    number: int,
    staged: Staged,
    flat: torch.Tensor,
    op: ReduceOp,
    *,
    everywhere: bool,
    memory: SharedTensor | None,
) -> Steps:
    """Reduce `flat` of all ranks.

    Args:
        generation: The group.
        number: Of the collective.
        staged: Where the result goes.
        flat: What is reduced.
        op: How.
        everywhere: This rank wants the result.
        memory: What is known of a tensor that lies in memory of all.
    """
    world_size = generation.board.layout.world_size
    places = {generation.board.memory_of(rank, number) for rank in range(world_size)}
    if memory is not None and places == {memory.number}:
        yield from reduce_in_place(generation.board, number, memory, op)
        return
    staging, size = generation.staging, flat.element_size()
    if world_size == 2:
        pair = PairReduction(staging, flat, op)
        yield from staging.exchange(staging.whole(flat.numel(), size, num_tensors=2), pair)
    else:
        transfer = Reduction(staging, [flat] * world_size, flat, op, everywhere=everywhere)
        yield from staging.transfer(staging.sliced(flat.numel(), size), transfer)
    staged.deliver()


def scatter_large(
    generation: SharedGeneration, staged: Staged, parts: list[torch.Tensor], flat: torch.Tensor, op: ReduceOp
) -> Steps:
    """Reduce each rank's part of what all have brought, this one's into `flat`."""
    staging = generation.staging
    windows = staging.whole(flat.numel(), flat.element_size(), num_tensors=len(parts))
    yield from staging.exchange(windows, Reduction(staging, parts, flat, op, scattered=True))
    staged.deliver()


def swap_large(generation: SharedGeneration, parts: list[torch.Tensor], staged: Sequence[Staged]) -> Steps:
    """Give each rank its part, and take one of each."""
    staging = generation.staging
    windows = staging.whole(parts[0].numel(), 1, num_tensors=len(parts))
    yield from staging.exchange(windows, Swap(staging, parts, [output.carrier for output in staged]))
    for output in staged:
        output.deliver()


def gather_large(
    generation: SharedGeneration,
    num_bytes: int,
    source: torch.Tensor | None,
    targets: dict[int, torch.Tensor],
    deliver: Callable[[], None],
) -> Steps:
    """Show `source` to all, and take what those of `targets` show, of at most so many bytes."""
    staging = generation.staging
    windows = staging.whole(num_bytes, 1, num_tensors=1)
    yield from staging.exchange(windows, Gather(staging, source, targets))
    deliver()
