"""Comparison between replicas of the gradients that the program changes after a backward pass, by checksums.

The next backward pass sends a checksum in its trailer. Nothing waits for the device, unless checksums differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch

from raydist.collectives.base import Communicator
from raydist.errors import CollectiveMismatchError

__all__ = ["Checksums", "combined", "compare"]

# Relative tolerance, as in the periodic comparison of parameters: last bits may differ between machines.
_LAST_BITS = 1e-5
_SAMPLE = 4096

_Row = tuple[float, float, float]
"""Number of a parameter, and sum and approximate norm of the parameter's gradient."""


@final
class Checksums:
    """Sums of some gradients, and the norms of their first elements, on the device of the gradients."""

    def __init__(self, indices: Sequence[int], scales: Sequence[float], numbers: torch.Tensor) -> None:
        self._indices, self._scales, self._numbers = tuple(indices), scales, numbers

    @classmethod
    def of(cls, gradients: Mapping[int, torch.Tensor]) -> Checksums:
        """Compute the checksums of gradients, given by parameter number. Does not wait for the device."""
        with torch.no_grad():
            values = [_values(gradient) for gradient in gradients.values()]
            wide = any(one.dtype is torch.float64 for one in values)
            dtype, device = torch.float64 if wide else torch.float32, values[0].device
            parts = [one.sum(dtype=dtype) for one in values]
            parts += [torch.linalg.vector_norm(one[:_SAMPLE], dtype=dtype) for one in values]
            numbers = torch.stack([part.to(device) for part in parts])
        scales = [max(1.0, one.numel() / _SAMPLE) ** 0.5 for one in values]
        return cls(list(gradients), scales, numbers)

    def combined(self) -> torch.Tensor:
        """Return one float64 on the device that depends on all sums and norms."""
        count = len(self._numbers) + 1
        return self._numbers.double() @ torch.arange(1, count, dtype=torch.float64, device=self._numbers.device)

    def rows(self) -> list[_Row]:
        """Return parameter number, sum and approximate norm of each gradient. Waits for the device."""
        numbers = self._numbers.tolist()
        sums, norms = numbers[: len(self._indices)], numbers[len(self._indices) :]
        return [
            (index, total, norm * scale)
            for index, total, norm, scale in zip(self._indices, sums, norms, self._scales, strict=True)
        ]


def combined(noted: Sequence[Checksums]) -> torch.Tensor | None:
    """Combine all checksums into one float64; None for an empty sequence."""
    total: torch.Tensor | None = None
    for one in noted:
        total = one.combined() if total is None else total * 3 + one.combined()
    return total


def compare(communicator: Communicator, noted: Sequence[Checksums], name_of: Callable[[int], str]) -> None:
    """Compare gradients whose combined checksums differ; replicas may differ in the last bits.

    Blocking: until all replicas call it, at most the communicator's limit.

    Raises:
        CollectiveMismatchError: Gradients differ. All replicas raise it; it names the first such parameter.
    """
    mine = json.dumps([row for one in noted for row in one.rows()]).encode()
    received = communicator.exchange_on_host(mine, "gradients that were changed")
    said: list[list[_Row]] = [[(row[0], row[1], row[2]) for row in json.loads(each)] for each in received]
    for place in range(max(map(len, said))):
        rows = [theirs[place] if place < len(theirs) else None for theirs in said]
        if not _all_close(rows):
            index = min(int(row[0]) for row in rows if row is not None)
            raise _apart(name_of(index), index, rows)


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """Return the values of a gradient as a flat real tensor."""
    values = gradient.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    return (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)


def _all_close(rows: Sequence[_Row | None]) -> bool:
    first = rows[0]
    if first is None:
        return False
    for row in rows[1:]:
        if row is None or row[0] != first[0]:
            return False
        for mine, theirs in ((first[1], row[1]), (first[2], row[2])):
            apart = abs(mine - theirs) > _LAST_BITS * (abs(mine) + first[2])  # comparisons with NaN are False
            if apart or math.isnan(mine) != math.isnan(theirs):
                return False
    return True


def _apart(name: str, index: int, rows: Sequence[_Row | None]) -> CollectiveMismatchError:
    said = [f"sum {row[1]:.7g}, norm about {row[2]:.7g}" if row and row[0] == index else "not changed" for row in rows]
    listed = "; ".join(f"replica {rank}: {text}" for rank, text in enumerate(said))
    return CollectiveMismatchError(
        "All replicas must change a gradient alike after the backward() that made it global, but they have changed "
        f"that of {name} differently, got {listed}. Use ctx.all_reduce for what a replica computes from its own rows, "
        "and the same random numbers for noise. To put a replica's own gradient into .grad by hand, call "
        "optimizer.zero_grad() first: optimizer.step() then exchanges it."
    )
