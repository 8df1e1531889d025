"""Conversion of Python, numpy and torch values to leaves of an element.

A Python int becomes int64, a float becomes float32, and a bool stays bool. Types of numpy and torch stay as they are. A
list becomes one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.pipelines.elements.small_floats import array_of_tensor, is_number

Leaf = Any  # a numpy array or scalar, bytes or str

PYTHON_DTYPES: dict[type, np.dtype[Any]] = {
    bool: np.dtype(np.bool_),
    int: np.dtype(np.int64),
    float: np.dtype(np.float32),
    complex: np.dtype(np.complex128),
}


def is_torch(value: Any) -> bool:
    """Return True if `value` is a torch tensor, without importing torch."""
    kind = type(value)
    return kind.__module__.partition(".")[0] == "torch" and hasattr(value, "detach")


def is_dataset(kind: type) -> bool:
    """Return True for a class of datasets. Imports no such class: datasets belong to a higher layer."""
    return getattr(kind, "__dataset_leaf__", False)


def as_leaf(value: Any) -> Leaf:
    """Convert one value from the user to a leaf.

    >>> as_leaf(3).dtype, as_leaf([1.5, 2]).dtype, as_leaf(b"x")
    (dtype('int64'), dtype('float32'), b'x')

    Raises:
        SpecError: The value cannot be a tensor.
    """
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, bytes | str):
        return bytes(value) if isinstance(value, bytes) else str(value)
    if isinstance(value, np.generic):
        return _array(np.asarray(value))[()]
    for kind, dtype in PYTHON_DTYPES.items():
        if isinstance(value, kind):
            return _python_numbers(value, dtype)[()]
    if isinstance(value, list):
        return _list(value)
    return _other_value(value)


def _python_numbers(value: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    try:
        return np.array(value, dtype)
    except OverflowError:
        raise InvalidArgumentError(
            f"A Python int must fit into int64, got {value!r:.100}. Use a float or a str."
        ) from None


def _array(array: np.ndarray[Any, Any]) -> Any:
    if is_number(array.dtype):
        return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    if array.dtype.kind in "SU":
        return array.astype(object)
    if array.dtype.kind == "O":
        kinds = {type(item) for item in array.flat}
        if kinds <= {bytes} or kinds <= {str}:
            return array
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise SpecError(
            f"A leaf must hold numbers, bools, bytes or str, got an object array of {names}. Pad arrays of "
            "several lengths in the function that makes them, or make each an element, and batch by padded_batch or "
            "ragged_batch."
        )
    raise SpecError(f"A leaf must hold numbers, bools, bytes or str, got dtype {array.dtype}. Convert it to numbers.")


def _list(values: list[Any]) -> Any:
    """Convert a list to one tensor. Python numbers inside follow the rules for Python numbers."""
    if not values:
        return np.empty(0, np.float32)
    dtype = PYTHON_DTYPES.get(type(values[0]))
    # A million numbers of one type are converted at once, without a loop.
    if dtype is not None and set(map(type, values)) == {type(values[0])}:
        return _python_numbers(values, dtype)
    leaves = [as_leaf(list(value) if type(value) is tuple else value) for value in values]
    if any(isinstance(leaf, bytes | str) for leaf in leaves):
        if len({type(leaf) for leaf in leaves}) > 1:
            raise SpecError(f"A list becomes one tensor and must hold one type, got {values!r:.200}.")
        column = np.empty(len(leaves), object)
        column[:] = leaves
        return column
    shapes = {np.shape(leaf) for leaf in leaves}
    if len(shapes) > 1:
        raise SpecError(
            f"A list becomes one tensor and must be rectangular, got rows of the shapes {_first_few(shapes)}."
        )
    return np.stack([np.asarray(leaf) for leaf in leaves]).astype(_list_dtype(leaves), copy=False)


def _list_dtype(leaves: Sequence[Any]) -> np.dtype[Any]:
    dtypes = {leaf.dtype for leaf in leaves}
    if dtypes == {PYTHON_DTYPES[int], PYTHON_DTYPES[float]}:  # [1, 2.5]: numpy would choose float64
        return PYTHON_DTYPES[float]
    return np.result_type(*dtypes)


def _first_few(things: set[Any]) -> str:
    return ", ".join(sorted(map(str, things))[:4])


def _other_value(value: Any) -> Any:
    if is_torch(value):
        return _torch(value)
    if hasattr(value, "__array__"):
        return _array(np.asarray(value))
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise SpecError(
        f"A leaf must be a number, a numpy array, a torch tensor, bytes or str, got {value!r:.100} of type {kind}. "
        "Tuples, dicts, namedtuples and dataclasses may hold several leaves. Convert any other object to a dict "
        "of its tensors; batch(n, collate=fn) can build objects from them again."
    )


def _torch(tensor: Any) -> Any:
    try:
        return _array(array_of_tensor(tensor.detach().cpu().resolve_conj().resolve_neg()))
    except TypeError:
        raise SpecError(
            f"A leaf must have a dtype that numpy or ml_dtypes knows, got a torch tensor of {tensor.dtype}. "
            "Return tensor.float() here and convert in the step, on the device."
        ) from None
