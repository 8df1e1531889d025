"""What the all-reduce sweep sends."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

SIZES: Mapping[str, int] = MappingProxyType(
    {"4 KB": 4_000, "1 MB": 1_000_000, "10 MB": 10_000_000, "100 MB": 100_000_000}
)


def buffer_of(num_bytes: int) -> torch.Tensor:
    """Sums stay what they are, whatever is repeated; the memory is written, so that its pages exist."""
    return torch.ones(num_bytes // 4).zero_()
