"""Numbers that other libraries do not take from numpy: bfloat16, the float8 types, dates and times.

Numpy has bfloat16 and the float8 types from `ml_dtypes` alone. Arrow, buffers and torch get the memory of all of these
as whole numbers of the same size. Torch has the small floats too; dates and times stay int64 there, in their unit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = [
    "SMALL_FLOATS",
    "array_of_tensor",
    "as_bits",
    "bits_dtype",
    "dtype_named",
    "has_bits",
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


def has_bits(dtype: np.dtype[Any]) -> bool:
    """Whether others get its memory as whole numbers: small floats, dates and times."""
    return dtype.kind in "mM" or is_small_float(dtype)


def is_number(dtype: np.dtype[Any]) -> bool:
    """Whether leaves may hold it: bools, dates, times, and numbers of any kind."""
    return (dtype.kind in "biufcmM" and is_numpys(dtype)) or is_small_float(dtype)


def dtype_kind(dtype: np.dtype[Any]) -> str:
    """Numpy's letter for what a dtype is; "f" for small floats, for most of which numpy has no letter."""
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


def bits_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The whole numbers that others get the memory of a dtype as; any other dtype as it is."""
    if dtype.kind in "mM":
        return np.dtype(np.int64)
    return np.dtype(f"u{dtype.itemsize}") if is_small_float(dtype) else dtype


def as_bits(array: _Array) -> _Array:
    """The memory of an array of these types as whole numbers; any other array as it is."""
    return array.view(bits_dtype(array.dtype)) if has_bits(array.dtype) else array


def tensor_of_array(array: _Array, from_numpy: Callable[[Any], Any]) -> Any:
    """The torch tensor over the memory of `array`. `from_numpy` is torch's: pipelines do without importing it."""
    if not is_small_float(array.dtype):
        return from_numpy(as_bits(array))
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
