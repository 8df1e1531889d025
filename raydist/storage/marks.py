"""Checksums that show writes to a tensor, for tensors whose version does not count and whose copy takes too long."""

from __future__ import annotations

import torch

from raydist.collectives.flat_bytes import flat_bytes

__all__ = ["mark_of_bits"]

_ROW = 1024
# Weights of columns, and of elements after the last whole row, relative to rows: odd, and larger than the number of
# rows, so that swapping two numbers changes the checksum.
_OF_COLUMNS, _OF_REST = (1 << 40) + 15, (1 << 52) + 21


def mark_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a checksum of a tensor's bits and their order, on the tensor's device.

    Returns:
        An int64 scalar. Reads the tensor's memory twice; copies only a tensor that is not contiguous.

    >>> one, other = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 3.0, 2.0, 4.0])
    >>> mark_of_bits(one) == mark_of_bits(one.clone()), mark_of_bits(one) == mark_of_bits(other)
    (tensor(True), tensor(False))
    """
    held = flat_bytes(tensor.detach())
    words = held.view(torch.int32) if len(held) % 4 == 0 else held
    whole = words.numel() // _ROW * _ROW
    rows, rest = words[:whole].view(-1, _ROW), words[whole:].to(torch.int64)
    by_row, by_column = (_weighed(rows.sum(dim, dtype=torch.int64)) for dim in (1, 0))
    return by_row + _OF_COLUMNS * by_column + _OF_REST * _weighed(rest)


def _weighed(numbers: torch.Tensor) -> torch.Tensor:
    """Return the sum of the numbers, each multiplied by its position; modulo 2**64."""
    return (numbers * torch.arange(1, len(numbers) + 1, device=numbers.device)).sum()
