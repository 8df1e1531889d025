"""Exchange of sparse gradients, such as those of large embeddings, as lists of rows.

The exchange runs at the end of a backward pass, apart from the buckets: an all-gather of the numbers of rows, then one
of the rows. All ranks get the same bits, since they add up the rows in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from raydist.collectives.base import Communicator
from raydist.collectives.flat_bytes import flat_bytes
from raydist.collectives.reducer.bucket import ParameterSpec
from raydist.values import ReduceOp

__all__ = ["SparseRows"]

_NONE, _ROWS, _DENSE = 0, 1, 2


@final
@dataclass(frozen=True, slots=True)
class _Held:
    """Kind and size of one rank's gradient of one parameter.

    Attributes:
        kind: `_NONE`, `_ROWS`, or `_DENSE` for a gradient that is not a list of rows.
        count: Number of rows.
    """

    kind: int
    count: int


@final
class SparseRows:
    """Sparse gradients of one backward pass of one rank.

    Args:
        communicator: Communicator of the exchange; nothing else may use it meanwhile.
        specs: The parameters, in the same order on all ranks.
        scale: Weight of new gradients.
        counts: False where this rank's new gradients count as zero.
        compression: Communication dtype of float32 values; None to keep float32.

    Attributes:
        local: New, unweighted gradients of this rank.
        preloaded: Weighted gradients of earlier local passes.
        reduced: Reduced gradients after `finish`, for parameters that have a gradient on any rank. They are sparse
            unless a rank had a dense one.
    """

    def __init__(
        self,
        communicator: Communicator,
        specs: Sequence[ParameterSpec],
        *,
        scale: float,
        counts: bool,
        compression: torch.dtype | None,
    ) -> None:
        self.local: dict[int, torch.Tensor] = {}
        self.preloaded: dict[int, torch.Tensor] = {}
        self.reduced: dict[int, torch.Tensor] = {}
        self._communicator = communicator
        self._specs = specs
        self._scale = scale
        self._counts = counts
        self._compression = compression

    @property
    def indices(self) -> list[int]:
        """Numbers of the parameters."""
        return [spec.index for spec in self._specs]

    def put(self, index: int, gradient: torch.Tensor) -> None:
        """Add a gradient of this pass. A parameter may get several."""
        before = self.local.get(index)
        self.local[index] = gradient if before is None else before + gradient

    def finish(self) -> None:
        """Exchange the gradients. Blocks until all ranks have ended their pass, at most the communicator's limit."""
        if not self._specs:
            return
        own = {spec.index: self._own(spec.index) for spec in self._specs}
        held = self._tell({index: _held(gradient) for index, gradient in own.items()})
        as_rows = []
        for place, spec in enumerate(self._specs):
            kinds = {row[place].kind for row in held}
            if _DENSE in kinds:
                self.reduced[spec.index] = self._all_reduced(spec, own[spec.index])
            elif _ROWS in kinds:
                as_rows.append(place)
        self._exchange_rows(as_rows, held, own)

    def _own(self, index: int) -> torch.Tensor | None:
        """Return this rank's weighted contribution to the gradient of a parameter."""
        new, earlier = self.local.get(index) if self._counts else None, self.preloaded.get(index)
        if new is None:
            return _coalesced(earlier)
        weighted = new.detach() * self._scale
        return _coalesced(weighted if earlier is None else earlier + weighted)

    def _tell(self, own: Mapping[int, _Held]) -> list[list[_Held]]:
        """Exchange kinds and numbers of rows; return them by rank and parameter."""
        numbers = [number for held in own.values() for number in (held.kind, held.count)]
        mine = torch.tensor(numbers, device=self._communicator.device)
        rows = [torch.empty_like(mine) for _ in range(self._communicator.world_size)]
        self._communicator.all_gather(rows, mine).wait()
        told = [row.tolist() for row in rows]
        return [[_Held(*row[place : place + 2]) for place in range(0, len(row), 2)] for row in told]

    def _all_reduced(self, spec: ParameterSpec, own: torch.Tensor | None) -> torch.Tensor:
        total = torch.zeros(spec.shape, dtype=spec.dtype, device=self._communicator.device)
        if own is not None:
            total.add_(own.to(total.device))
        self._communicator.all_reduce(total, ReduceOp.SUM).wait()
        return total.to(spec.device)

    def _exchange_rows(
        self, places: Sequence[int], held: Sequence[Sequence[_Held]], own: Mapping[int, torch.Tensor | None]
    ) -> None:
        if not places:
            return
        specs = [self._specs[place] for place in places]
        sizes = [sum(self._num_bytes(self._specs[place], row[place].count) for place in places) for row in held]
        mine = torch.zeros(max(sizes), dtype=torch.uint8, device=self._communicator.device)
        packed = [part for spec in specs for part in self._packed(spec, own[spec.index])]
        if packed:
            torch.cat(packed, out=mine[: sizes[self._communicator.rank]])
        pieces = [torch.empty_like(mine) for _ in held]
        if len(mine):
            self._communicator.all_gather(pieces, mine).wait()
        found: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {spec.index: [] for spec in specs}
        for piece, row in zip(pieces, held, strict=True):
            start = 0
            for place, spec in zip(places, specs, strict=True):
                size = self._num_bytes(spec, row[place].count)
                found[spec.index].append(self._unpacked(spec, piece[start : start + size], row[place].count))
                start += size
        for spec in specs:
            self.reduced[spec.index] = _added_up(spec, found[spec.index])

    def _wire(self, spec: ParameterSpec) -> torch.dtype:
        compressed = self._compression is not None and spec.dtype is torch.float32
        return self._compression if compressed and self._compression is not None else spec.dtype

    def _num_bytes(self, spec: ParameterSpec, count: int) -> int:
        return count * (8 + _row_numel(spec) * self._wire(spec).itemsize)

    def _packed(self, spec: ParameterSpec, own: torch.Tensor | None) -> list[torch.Tensor]:
        """Return row indices, then values, as bytes."""
        if own is None or not len(own.values()):
            return []
        parts = own.indices()[0], own.values().to(self._wire(spec))
        return [flat_bytes(part.to(self._communicator.device)) for part in parts]

    def _unpacked(self, spec: ParameterSpec, piece: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        # `view` as another dtype needs aligned memory, which a clone has.
        rows = piece[: 8 * count].clone().view(torch.int64)
        values = piece[8 * count :].clone().view(self._wire(spec)).to(spec.dtype)
        return rows.to(spec.device), values.view(count, *spec.shape[1:]).to(spec.device)


def _row_numel(spec: ParameterSpec) -> int:
    return torch.Size(spec.shape[1:]).numel()


def _coalesced(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.coalesce() if gradient is not None and gradient.is_sparse else gradient


def _held(gradient: torch.Tensor | None) -> _Held:
    if gradient is None:
        return _Held(_NONE, 0)
    if gradient.is_sparse and gradient.sparse_dim() == 1:
        return _Held(_ROWS, len(gradient.values()))
    return _Held(_DENSE, 0)


def _added_up(spec: ParameterSpec, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Sum the rows of all ranks. A rank has each row once at most, so the order of additions is fixed."""
    rows, places = torch.unique(torch.cat([rows for rows, _ in parts]), sorted=True, return_inverse=True)
    total = torch.zeros(len(rows), *spec.shape[1:], dtype=spec.dtype, device=spec.device)
    start = 0
    for own, values in parts:
        total[places[start : start + len(own)]] += values
        start += len(own)
    return torch.sparse_coo_tensor(rows.view(1, -1), total, spec.shape, is_coalesced=True, check_invariants=False)
