"""Aggregation of the values of all replicas, and division of one value among replicas. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["aggregate", "average", "share_of", "wide"]


def aggregate(values: Sequence[torch.Tensor], how: str) -> torch.Tensor:
    """Return the aggregate of the values of all replicas, in rank order.

    >>> aggregate([torch.tensor(1), torch.tensor(2)], "sum"), aggregate([torch.tensor(1), torch.tensor(2)], "first")
    (tensor(3), tensor(1))
    """
    if how == "first" or len(values) == 1:
        return values[0]
    if how == "mean":
        return average(values)
    return (_added(values[1:]) + wide(values[0])).to(values[0].dtype)


def share_of(value: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """One replica's share: an N-th part, and for the first what is missing to the sum, so that it is `value` again.

    >>> [share_of(torch.tensor(8), rank, 3).item() for rank in range(3)]
    [4, 2, 2]
    """
    whole = wide(value)
    is_integer = not (value.is_floating_point() or value.is_complex())
    part = torch.div(whole, world_size, rounding_mode="trunc" if is_integer else None).to(value.dtype)
    if rank or world_size == 1:
        return part
    # Added up as `aggregate` does, the others' is at least half of the whole: this difference has no rounding error.
    missing = (whole - _added([part] * (world_size - 1))).to(value.dtype)
    return missing if is_integer else torch.where(torch.isfinite(whole), missing, part)


def _added(values: Sequence[torch.Tensor]) -> torch.Tensor:
    total = wide(values[0])
    for value in values[1:]:
        total = total + wide(value)
    return total


def wide(value: torch.Tensor) -> torch.Tensor:
    """The value in the widest type of its kind: sums of it are rounded once."""
    if value.is_complex():
        return value.to(torch.complex128)
    return value.to(torch.float64 if value.is_floating_point() else torch.int64)


def average(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elementwise mean; elements that are equal everywhere keep their exact value.

    >>> average([torch.tensor([1.0, 0.1]), torch.tensor([3.0, 0.1])])
    tensor([2.0000, 0.1000])
    """
    first = values[0]
    if len(values) == 1:
        return first
    equal = torch.ones_like(first, dtype=torch.bool)
    for value in values[1:]:
        equal &= value == first
    mean = torch.stack([wide(value) for value in values]).mean(0).to(first.dtype)
    return torch.where(equal, first, mean)
