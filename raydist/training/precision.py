"""The module's forward pass in the precision of `compile`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from raydist.nest import leaves_in, map_structure
from raydist.training.elements import apply_module

__all__ = ["Precision", "autocast", "forward", "widened"]

Precision = Literal["bf16", "fp16"] | None

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(x: Any, precision: Precision) -> AbstractContextManager[Any]:
    """Return `torch.autocast` for the device of `x`, or a null context without a precision."""
    if precision is None:
        return nullcontext()
    device = next((leaf.device.type for leaf in leaves_in(x) if isinstance(leaf, torch.Tensor)), "cpu")
    return torch.autocast(device, _TYPES[precision])


def forward(module: nn.Module, x: Any, precision: Precision) -> Any:
    """Return the module's output for `x`; with "bf16" and "fp16" under torch.autocast, 16-bit outputs cast to float32.

    Losses and metrics are then computed in float32, and outputs can become numpy arrays, which lack bfloat16.

    >>> forward(nn.Linear(2, 1), torch.ones(3, 2), "bf16").dtype
    torch.float32
    """
    with autocast(x, precision):
        outputs = apply_module(module, x)
    if precision is None:
        return outputs
    return list(map(widened, outputs)) if isinstance(outputs, list) else widened(outputs)


def widened(outputs: Any) -> Any:
    """Cast 16-bit tensors to float32."""
    return map_structure(
        lambda leaf: leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype in _TYPES.values() else leaf, outputs
    )
