"""The memory of a tensor, byte by byte."""

from __future__ import annotations

import torch

__all__ = ["flat_bytes"]


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor as uint8 (n,): a view of it where it is contiguous, else of a copy.

    To torch a tensor of one element, or of none, is contiguous whatever its strides are, and `view(torch.uint8)`
    refuses them: such is `batch[:, 1]` of a batch of one row.

    >>> flat_bytes(torch.ones(4, 2, dtype=torch.int8)[:1, 1])
    tensor([1], dtype=torch.uint8)
    """
    dense = tensor.contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
