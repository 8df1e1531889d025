"""Floats of 8 and 16 bits that numpy has from `ml_dtypes` alone: bfloat16 and the float8 types, as torch has them.

Arrow, buffers and torch know nothing of numpy's: to them goes the memory, as whole numbers of the same size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = [
    "SMALL_FLOATS",
    "array_of_tensor",
    "as_bits",
    "dtype_named",
    "is_number",
    "is_numpys",
    "is_small_float",
    "dtype_kind",
    "tensor_of_array",
]

_Array = np.ndarray[Any, np.dtype[Any]]

SMALL_FLOATS = frozenset(
    ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
)
"""The names of these types."""

_FIRST_OF_OTHERS = 256  # numpy's number of the first dtype that is not its own


def is_numpys(dtype: np.dtype[Any]) -> bool:
    """Whether it is a dtype of numpy's own."""
    return dtype.num < _FIRST_OF_OTHERS


def is_small_float(dtype: np.dtype[Any]) -> bool:
    """Whether it is one of these types."""
    return not is_numpys(dtype) and dtype.name in SMALL_FLOATS


def is_number(dtype: np.dtype[Any]) -> bool:
    """Whether leaves may hold it: bools, and numbers of any kind."""
    return (dtype.kind in "biufc" and is_numpys(dtype)) or is_small_float(dtype)


def dtype_kind(dtype: np.dtype[Any]) -> str:
    """Numpy's letter for what a dtype is; "f" for these types, for most of which numpy has no letter."""
    return "f" if is_small_float(dtype) else dtype.kind


def dtype_named(name: str) -> np.dtype[Any]:
    """The dtype of this name.

    >>> dtype_named("bfloat16").itemsize
    2

    Raises:
        TypeError: There is none.
    """
    if name in SMALL_FLOATS:
        import ml_dtypes  # by those who have such numbers

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found
    return np.dtype(name)


def as_bits(array: _Array) -> _Array:
    """The memory of an array of these types as whole numbers; any other array as it is."""
    return array.view(f"u{array.dtype.itemsize}") if is_small_float(array.dtype) else array


def tensor_of_array(array: _Array, from_numpy: Callable[[Any], Any]) -> Any:
    """The torch tensor over the memory of `array`. `from_numpy` is torch's: pipelines do without importing it."""
    if not is_small_float(array.dtype):
        return from_numpy(array)
    import torch  # it is there: see above

    return from_numpy(as_bits(array)).view(getattr(torch, array.dtype.name))


def array_of_tensor(tensor: Any) -> _Array:
    """The memory of a torch tensor on the CPU.

    Raises:
        TypeError: It has a dtype that numpy does not know.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in SMALL_FLOATS:
        found: _Array = tensor.numpy()
        return found
    import torch

    dtype = dtype_named(name)
    bits: _Array = tensor.view(torch.uint8 if dtype.itemsize == 1 else torch.int16).numpy()
    return bits.view(dtype)
