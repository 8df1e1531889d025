"""The bytes of a tensor."""

from __future__ import annotations

import torch


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as uint8 (n,): a view of a contiguous tensor, else of a copy.

    torch takes a tensor of at most one element for contiguous whatever its strides are, but `view(torch.uint8)` refuses
    such strides. An example is `batch[:, 1]` of a batch of one row.

    >>> flat_bytes(torch.ones(4, 2, dtype=torch.int8)[:1, 1])
    tensor([1], dtype=torch.uint8)
    """
    dense = tensor.contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
