"""The description of an embedding table, and the initial values of its rows: functions of seed and row number."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
import torch

Words = np.ndarray[Any, np.dtype[np.uint64]]

_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_STEP = np.uint64(0x9E3779B97F4A7C15)


def hash_mix(words: Words) -> Words:
    """Return words of which every bit depends on every bit of the input: one step of SplitMix64, which is one to one.

    >>> [hex(word) for word in hash_mix(np.array([0, 1], np.uint64))]
    ['0xe220a8397b1dcdaf', '0x910a2dec89025cc1']
    """
    mixed: Words = words + _STEP
    held = np.empty_like(mixed)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        np.right_shift(mixed, np.uint64(shift), out=held)
        np.bitwise_xor(mixed, held, out=mixed)
        np.multiply(mixed, factor, out=mixed)
    np.right_shift(mixed, np.uint64(31), out=held)
    np.bitwise_xor(mixed, held, out=mixed)
    return mixed


_DEALING = np.uint64(0x5851F42D4C957F2D)


@final
@dataclass(frozen=True, slots=True)
class EmbeddingTableSpec:
    """A table of rows that exist once they are touched.

    >>> EmbeddingTableSpec(10**9, 16).row_bytes
    64
    """

    num_rows: int  # number of rows; row numbers are below it
    dim: int  # number of values in a row
    dtype: torch.dtype = torch.float32  # dtype of the values
    seed: int = 0  # together with a row's number, the seed determines the row's initial values
    # distribution of initial values: normal with mean 0, uniform between -1 and 1, or zero
    initializer: Literal["normal", "uniform", "zeros"] = "normal"
    scale: float = 1.0  # factor of the initial values
    name: str = "embedding"  # name for messages

    @property
    def row_bytes(self) -> int:
        """Size of one row's values in bytes."""
        return self.dim * self.dtype.itemsize

    def servers_of(self, rows: torch.Tensor, num_servers: int) -> torch.Tensor:
        """Return the server of each row, the same everywhere. Neighbouring and frequent rows are spread over servers.

        >>> EmbeddingTableSpec(100, 4).servers_of(torch.arange(8), 2).tolist()
        [1, 1, 0, 0, 1, 0, 1, 1]
        """
        if num_servers == 1:
            return torch.zeros_like(rows)
        mixed = hash_mix(rows.numpy().view(np.uint64) ^ _DEALING) >> np.uint64(32)
        return torch.from_numpy((mixed * np.uint64(num_servers) >> np.uint64(32)).view(np.int64))


_ALL_BITS = (1 << 64) - 1


def first_values(spec: EmbeddingTableSpec, rows: torch.Tensor) -> torch.Tensor:
    """Return the initial values of some rows.

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
    seed = hash_mix(np.array([spec.seed & _ALL_BITS], np.uint64))
    begins = hash_mix(rows.numpy().view(np.uint64) + seed)
    steps = np.arange((spec.dim + 1) // 2, dtype=np.uint64) * _STEP
    words: Words = hash_mix((begins[:, None] + steps).reshape(-1))
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
