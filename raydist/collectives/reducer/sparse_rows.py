"""Exchange of sparse gradients, such as those of large embeddings, as lists of rows.

The exchange runs at the end of a backward pass, apart from the buckets: an all-gather of the numbers of rows, then two
for each parameter. All ranks get the same bits, since they add up the rows in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from raydist.collectives.base import Communicator
from raydist.collectives.reducer.buckets import ParameterSpec, wire_dtype

_NONE, _ROWS, _DENSE = 0, 1, 2


def reduce_rows(
    communicator: Communicator,
    specs: Sequence[ParameterSpec],
    own: Mapping[int, torch.Tensor | None],
    compression: torch.dtype | None = None,
) -> dict[int, torch.Tensor]:
    """Sum gradients over ranks. Blocks until all ranks call it, at most the communicator's limit.

    Args:
        communicator: Communicator of the exchange; nothing else may use it meanwhile.
        specs: The parameters, in the same order on all ranks.
        own: This rank's weighted gradients, by parameter number; None for no gradient.

    Returns:
        Sums, by parameter number, for parameters that have a gradient on any rank. A sum is sparse unless a rank has a
        gradient that is not a list of rows.
    """
    if not specs:
        return {}
    kinds = [_kind(own[spec.index]) for spec in specs]
    lists = [_rows_of(spec, own[spec.index]) for spec in specs]
    numbers = [[kind, len(rows)] for kind, (rows, _) in zip(kinds, lists, strict=True)]
    mine = torch.tensor(numbers, device=communicator.device)
    gathered = [torch.empty_like(mine) for _ in range(communicator.world_size)]
    communicator.all_gather(gathered, mine).wait()
    told = [each.tolist() for each in gathered]
    reduced = {}
    for place, (spec, (rows, values)) in enumerate(zip(specs, lists, strict=True)):
        lengths = [row[place][1] for row in told]
        kind = max(row[place][0] for row in told)
        if kind != _NONE:
            every_row = _gather(communicator, rows, lengths)
            every_value = _gather(communicator, values.to(wire_dtype(spec.dtype, compression)), lengths)
            total = _added_up(spec, every_row, every_value)
            reduced[spec.index] = total.to_dense() if kind == _DENSE else total
    return reduced


def _kind(gradient: torch.Tensor | None) -> int:
    if gradient is None:
        return _NONE
    return _ROWS if gradient.is_sparse and gradient.sparse_dim() == 1 else _DENSE


def _rows_of(spec: ParameterSpec, gradient: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers of rows, each one once, and their values."""
    if gradient is None:
        rows = torch.empty(0, dtype=torch.int64, device=spec.device)
        return rows, torch.empty(0, *spec.shape[1:], dtype=spec.dtype, device=spec.device)
    if _kind(gradient) == _ROWS:
        coalesced = gradient.coalesce()
        return coalesced.indices()[0], coalesced.values()
    return torch.arange(spec.shape[0], device=spec.device), gradient.to_dense()


def _gather(communicator: Communicator, tensor: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    mine = tensor.contiguous().to(communicator.device)
    parts = [mine.new_empty(length, *mine.shape[1:]) for length in lengths]
    if any(lengths):
        communicator.all_gather_rows(parts, mine).wait()
    return parts


def _added_up(spec: ParameterSpec, rows: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum the rows of all ranks. A rank has each row once at most, so the order of additions is fixed."""
    every_row, places = torch.unique(torch.cat(list(rows)).to(spec.device), sorted=True, return_inverse=True)
    total = torch.zeros(len(every_row), *spec.shape[1:], dtype=spec.dtype, device=spec.device)
    for own, value in zip(places.split([len(part) for part in rows]), values, strict=True):
        total[own] += value.to(spec.device, spec.dtype)
    return torch.sparse_coo_tensor(every_row.view(1, -1), total, spec.shape, is_coalesced=True, check_invariants=False)
