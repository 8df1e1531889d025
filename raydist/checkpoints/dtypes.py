"""Tensors and arrays that a safetensors file can hold, and the safetensors names of their dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["as_storable_array", "dtype_name", "is_storable_tensor", "stored_dtype", "torch_dtype"]

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of a dtype.

    >>> dtype_name(torch.bfloat16)
    'BF16'
    """
    return _NAMES[dtype]


def stored_dtype(name: str) -> torch.dtype:
    """Return the dtype of a safetensors name. Raise ValueError for an unknown name.

    >>> stored_dtype("I64")
    torch.int64
    """
    if name not in _DTYPES:
        raise ValueError(f"tensors of the type {name!r:.50} are unknown")
    return _DTYPES[name]


def torch_dtype(value: torch.Tensor | np.ndarray[Any, Any]) -> torch.dtype:
    """Return the dtype of a tensor, or the torch dtype that corresponds to an array's.

    >>> torch_dtype(np.zeros(2, "uint16"))
    torch.uint16
    """
    return value.dtype if isinstance(value, torch.Tensor) else torch.from_numpy(np.empty(0, value.dtype)).dtype


def is_storable_tensor(tensor: torch.Tensor) -> bool:
    """Return True for a plain dense tensor with a dtype that safetensors supports.

    >>> is_storable_tensor(torch.ones(2)), is_storable_tensor(torch.ones(2).to_sparse())
    (True, False)
    """
    plain = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested
    return plain and tensor.dtype in _NAMES


def as_storable_array(value: Any) -> np.ndarray[Any, Any] | None:
    """Return a numpy array or scalar in native byte order; None if masked or of a type that safetensors lacks.

    >>> as_storable_array(np.float64(2.5)), as_storable_array(np.array(["a"]))
    (array(2.5), None)
    """
    if isinstance(value, np.ma.MaskedArray):
        return None
    array = np.asarray(value)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.dtype.kind not in "biufc" or array.dtype.itemsize > 8:
        return None
    return array
