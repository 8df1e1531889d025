"""The specification of an embedding table, and the initial values of a row as a function of seed and row number."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
import torch

Words = np.ndarray[Any, np.dtype[np.uint64]]

# Constants of SplitMix64.
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_STEP = np.uint64(0x9E3779B97F4A7C15)


def hash_mix(words: Words) -> Words:
    """Hash words by one step of SplitMix64, a bijection: every bit of the result depends on every bit of the input.

    >>> [hex(word) for word in hash_mix(np.array([0, 1], np.uint64))]
    ['0xe220a8397b1dcdaf', '0x910a2dec89025cc1']
    """
    mixed: Words = words + _STEP
    shifted = np.empty_like(mixed)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        np.right_shift(mixed, np.uint64(shift), out=shifted)
        np.bitwise_xor(mixed, shifted, out=mixed)
        np.multiply(mixed, factor, out=mixed)
    np.right_shift(mixed, np.uint64(31), out=shifted)
    np.bitwise_xor(mixed, shifted, out=mixed)
    return mixed


_SERVER_SALT = np.uint64(0x5851F42D4C957F2D)


@final
@dataclass(frozen=True, slots=True)
class EmbeddingTableSpec:
    """An embedding table whose servers create a row at the first access.

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
        """Return the server of each row, the same in all processes. A hash spreads neighbouring and frequent rows.

        >>> EmbeddingTableSpec(100, 4).servers_of(torch.arange(8), 2).tolist()
        [1, 1, 0, 0, 1, 0, 1, 1]
        """
        if num_servers == 1:
            return torch.zeros_like(rows)
        mixed = hash_mix(rows.numpy().view(np.uint64) ^ _SERVER_SALT) >> np.uint64(32)
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
    random_bits = _random_bits(spec, rows)
    values = _uniform(random_bits, exact) if spec.initializer == "uniform" else _normal(random_bits, exact)
    return values[:, : spec.dim].mul_(spec.scale).to(spec.dtype).contiguous()


def _random_bits(spec: EmbeddingTableSpec, rows: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return 32 random bits per value, for an even number of values per row: SplitMix64 output i holds two values."""
    seed = hash_mix(np.array([spec.seed & _ALL_BITS], np.uint64))
    row_seeds = hash_mix(rows.numpy().view(np.uint64) + seed)
    steps = np.arange((spec.dim + 1) // 2, dtype=np.uint64) * _STEP
    words: Words = hash_mix((row_seeds[:, None] + steps).reshape(-1))
    return words.view(np.uint32).reshape(len(rows), -1)


def _unit(bits: np.ndarray[Any, np.dtype[np.uint32]], dtype: torch.dtype) -> torch.Tensor:
    """Return uniform numbers in (0, 1]; only the rounding of float32 gives 1."""
    kept = 24 if dtype is torch.float32 else 32
    numbers = (bits >> np.uint32(32 - kept)).astype(np.float32 if dtype is torch.float32 else np.float64)
    return torch.from_numpy(numbers).add_(0.5).mul_(2.0**-kept)


def _uniform(random_bits: np.ndarray[Any, np.dtype[np.uint32]], dtype: torch.dtype) -> torch.Tensor:
    return _unit(random_bits, dtype).mul_(2).sub_(1)


def _normal(random_bits: np.ndarray[Any, np.dtype[np.uint32]], dtype: torch.dtype) -> torch.Tensor:
    """Return normal numbers by the Box-Muller transform, which turns two uniform numbers into two normal ones."""
    length = _unit(np.ascontiguousarray(random_bits[:, 0::2]), dtype).log_().mul_(-2).sqrt_()
    angle = _unit(np.ascontiguousarray(random_bits[:, 1::2]), dtype).mul_(2 * math.pi)
    return torch.cat([length * angle.cos(), length.mul_(angle.sin_())], dim=1)
