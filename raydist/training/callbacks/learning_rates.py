"""Read and set the learning rates of an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from raydist.errors import InvalidArgumentError

__all__ = ["change_rates", "rates_of"]


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the learning rate of each parameter group.

    >>> rates_of(torch.optim.SGD([torch.zeros(1)], lr=0.5))
    [0.5]
    """
    return [float(group["lr"]) for group in optimizer.param_groups]


def change_rates(optimizer: torch.optim.Optimizer, change: Callable[[float], Any]) -> bool:
    """Set each group's rate to the result of `change` for its current rate. Return True if any rate changed.

    Raises:
        InvalidArgumentError: `change` did not return a number.
    """
    before = rates_of(optimizer)
    after = [_number(change(rate)) for rate in before]
    for group, rate in zip(optimizer.param_groups, after, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.full_like(group["lr"], rate)
        else:
            group["lr"] = rate
    return after != before


def _number(rate: Any) -> float:
    if isinstance(rate, bool | str | bytes) or not hasattr(rate, "__float__"):
        raise InvalidArgumentError(f"A learning rate must be a number, got {rate!r:.80}. Return one from the schedule.")
    return float(rate)
