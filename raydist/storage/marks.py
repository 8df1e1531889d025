"""Marks by which it is seen that a tensor was written: where its version says nothing, and a copy takes too long."""

from __future__ import annotations

import torch

from raydist.collectives.flat_bytes import flat_bytes

__all__ = ["mark_of_bits"]

_ROW = 1024
# Of places in a row, and of those behind the last whole row, against rows: odd, and more than there are of these, so
# that two numbers that change places change the mark.
_OF_COLUMNS, _OF_REST = (1 << 40) + 15, (1 << 52) + 21


def mark_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A number, on the tensor's device, that other bits hardly have, nor the same ones in another order.

    Returns:
        A scalar of int64. The tensor's memory is read twice; nothing as large is made, unless it is not contiguous.

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
    """Their sum, each as often as its place says; modulo 2**64."""
    return (numbers * torch.arange(1, len(numbers) + 1, device=numbers.device)).sum()
