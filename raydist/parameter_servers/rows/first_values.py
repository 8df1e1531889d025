"""Initial values of rows: functions of seed and row number, the same on every server."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from raydist.parameter_servers.rows.scrambling import Words, scramble
from raydist.parameter_servers.rows.table_spec import EmbeddingTableSpec

__all__ = ["first_values"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ALL_BITS = (1 << 64) - 1


def first_values(spec: EmbeddingTableSpec, rows: torch.Tensor) -> torch.Tensor:
    """Return the initial values of some rows.

    Args:
        spec: Description of the table.
        rows: int64 row numbers, in any order.

    >>> spec = EmbeddingTableSpec(100, 3, seed=7)
    >>> together, alone = first_values(spec, torch.tensor([1, 42])), first_values(spec, torch.tensor([42]))
    >>> torch.equal(together[1:], alone)
    True
    """
    if spec.initializer == "zeros":
        return torch.zeros((len(rows), spec.dim), dtype=spec.dtype)
    exact = torch.float64 if spec.dtype is torch.float64 else torch.float32
    halves = _halves(spec, rows)
    values = _uniform(halves, exact) if spec.initializer == "uniform" else _normal(halves, exact)
    return values[:, : spec.dim].mul_(spec.scale).to(spec.dtype).contiguous()


def _halves(spec: EmbeddingTableSpec, rows: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return 32 random bits for each value, for an even number of values: word i of a row is its i-th SplitMix64."""
    seed = scramble(np.array([spec.seed & _ALL_BITS], np.uint64))
    begins = scramble(rows.numpy().view(np.uint64) + seed)
    steps = np.arange((spec.dim + 1) // 2, dtype=np.uint64) * _GOLDEN
    words: Words = scramble((begins[:, None] + steps).reshape(-1))
    return words.view(np.uint32).reshape(len(rows), -1)


def _unit(bits: np.ndarray[Any, np.dtype[np.uint32]], dtype: torch.dtype) -> torch.Tensor:
    """Return uniform numbers between 0 and 1, both excluded."""
    kept = 24 if dtype is torch.float32 else 32
    numbers = (bits >> np.uint32(32 - kept)).astype(np.float32 if dtype is torch.float32 else np.float64)
    return torch.from_numpy(numbers).add_(0.5).mul_(2.0**-kept)


def _uniform(halves: np.ndarray[Any, np.dtype[np.uint32]], dtype: torch.dtype) -> torch.Tensor:
    return _unit(halves, dtype).mul_(2).sub_(1)


def _normal(halves: np.ndarray[Any, np.dtype[np.uint32]], dtype: torch.dtype) -> torch.Tensor:
    """Return normal numbers by the Box-Muller transform: two uniform numbers make two normal ones."""
    length = _unit(np.ascontiguousarray(halves[:, 0::2]), dtype).log_().mul_(-2).sqrt_()
    angle = _unit(np.ascontiguousarray(halves[:, 1::2]), dtype).mul_(2 * math.pi)
    return torch.cat([length * angle.cos(), length.mul_(angle.sin_())], dim=1)
