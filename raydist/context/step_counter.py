"""The global step: the number of batches that a strategy has trained on."""

from __future__ import annotations

import functools
from typing import final

import torch
from torch import nn

__all__ = ["StepCounter", "process_counter"]


@final
class StepCounter(nn.Module):
    """The global step of one strategy. Its buffer is mirrored; each replica adds to its own copy.

    >>> counter = StepCounter()
    >>> counter.value += 1
    >>> counter.value
    tensor(1)
    """

    value: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros((), dtype=torch.int64))


@functools.cache
def process_counter() -> StepCounter:
    """Return the counter of this process outside of every scope."""
    return StepCounter()
