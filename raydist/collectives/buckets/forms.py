"""Gradients on their way in and out of an exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

__all__ = ["GlobalGradient", "StepWeight"]


@final
@dataclass(frozen=True, slots=True)
class StepWeight:
    """What a step does with new gradients: multiply by `scale`, or drop them where the replica counts nothing."""

    scale: float
    counts: bool


@final
@dataclass(frozen=True, slots=True)
class GlobalGradient:
    """The reduced gradient of one parameter, one that at least one rank has.

    Attributes:
        value: Of the parameter's shape; a sparse tensor where it travelled as rows, else dense.
        sparse: Whether a rank had it as a sparse tensor.
    """

    value: torch.Tensor
    sparse: bool
