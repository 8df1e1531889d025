"""Conversion of arguments of `rd.summary` to numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["as_array"]


def as_array(data: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a tensor, an array or nested numbers as an array, which may share memory with it. Blocks for a device.

    >>> import torch
    >>> as_array(torch.ones(2, dtype=torch.bfloat16)).dtype
    dtype('float32')
    """
    if not isinstance(data, torch.Tensor):
        return np.asarray(data)
    tensor = data.detach()
    tensor = tensor.as_subclass(torch.Tensor) if tensor.layout is torch.strided else tensor.to_dense()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    array: np.ndarray[Any, np.dtype[Any]] = tensor.cpu().numpy()
    return array
