"""The module's forward, in the precision that a model is compiled with."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from raydist.nest import leaves_in, map_structure
from raydist.training.elements import apply_module

__all__ = ["Precision", "forward"]

Precision = Literal["bf16"] | None


def forward(module: nn.Module, x: Any, precision: Precision) -> Any:
    """What the module returns for `x`; under "bf16" by torch.autocast, its bfloat16 outputs as float32.

    Losses and metrics then count in float32, and outputs can become numpy arrays, which know no bfloat16.

    >>> forward(nn.Linear(2, 1), torch.ones(3, 2), "bf16").dtype
    torch.float32
    """
    if precision is None:
        return apply_module(module, x)
    device = next((leaf.device.type for leaf in leaves_in(x) if isinstance(leaf, torch.Tensor)), "cpu")
    with torch.autocast(device, torch.bfloat16):
        outputs = apply_module(module, x)
    return list(map(_widened, outputs)) if isinstance(outputs, list) else _widened(outputs)


def _widened(outputs: Any) -> Any:
    return map_structure(
        lambda leaf: leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bfloat16 else leaf, outputs
    )
