"""Dtypes that other libraries do not accept from numpy: bfloat16, the float8 types, dates and times.

Numpy gets bfloat16 and the float8 types from `ml_dtypes`. Arrow, buffers and torch receive the memory of all these
dtypes as integers of the same size. Torch has the small floats too; dates and times stay int64 there, in their unit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

_Array = np.ndarray[Any, np.dtype[Any]]

SMALL_FLOATS = frozenset(
    ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
)
"""Names of the small float types."""

_FIRST_OF_OTHERS = 256  # type number of the first dtype that is not built into numpy


def is_numpys(dtype: np.dtype[Any]) -> bool:
    """Return True for a dtype that is built into numpy."""
    return dtype.num < _FIRST_OF_OTHERS


def is_small_float(dtype: np.dtype[Any]) -> bool:
    """Return True for bfloat16 and the float8 types."""
    return not is_numpys(dtype) and dtype.name in SMALL_FLOATS


def has_bits(dtype: np.dtype[Any]) -> bool:
    """Return True if other libraries receive the memory as integers: small floats, dates and times."""
    return dtype.kind in "mM" or is_small_float(dtype)


def is_number(dtype: np.dtype[Any]) -> bool:
    """Return True if leaves may have this dtype: bools, dates, times, and numbers of any kind."""
    return (dtype.kind in "biufcmM" and is_numpys(dtype)) or is_small_float(dtype)


def dtype_kind(dtype: np.dtype[Any]) -> str:
    """Return numpy's letter for the kind of a dtype; "f" for small floats, most of which have no letter in numpy."""
    return "f" if is_small_float(dtype) else dtype.kind


def dtype_named(name: str) -> np.dtype[Any]:
    """Return the dtype with this name.

    >>> dtype_named("bfloat16").itemsize
    2

    Raises:
        TypeError: No dtype has this name.
    """
    if name in SMALL_FLOATS:
        import ml_dtypes  # only for users of such numbers

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found
    return np.dtype(name)


def bits_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the integer dtype with which other libraries receive the memory; any other dtype unchanged."""
    if dtype.kind in "mM":
        return np.dtype(np.int64)
    return np.dtype(f"u{dtype.itemsize}") if is_small_float(dtype) else dtype


def as_bits(array: _Array) -> _Array:
    """Return the memory of an array of such a dtype as integers; any other array unchanged."""
    return array.view(bits_dtype(array.dtype)) if has_bits(array.dtype) else array


def tensor_of_array(array: _Array, from_numpy: Callable[[Any], Any]) -> Any:
    """Return the torch tensor over the memory of `array`. `from_numpy` is torch's, so torch need not be imported."""
    if not is_small_float(array.dtype):
        return from_numpy(as_bits(array))
    import torch  # already imported: the caller passes `from_numpy`

    return from_numpy(as_bits(array)).view(getattr(torch, array.dtype.name))


def array_of_tensor(tensor: Any) -> _Array:
    """Return the memory of a torch tensor on the CPU as an array.

    Raises:
        TypeError: Numpy does not know the dtype.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in SMALL_FLOATS:
        found: _Array = tensor.numpy()
        return found
    import torch

    dtype = dtype_named(name)
    bits: _Array = tensor.view(torch.uint8 if dtype.itemsize == 1 else torch.int16).numpy()
    return bits.view(dtype)
