"""What functions of `rd.summary` are given, as numpy arrays of this process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["as_array"]


def as_array(data: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """A tensor, an array or nested numbers; it may share memory with what was given. Waits for a device.

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
