"""Specs: the shape and dtype of one leaf of an element."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.nest import unflatten
from raydist.pipelines.elements.element_nests import flatten_element
from raydist.pipelines.elements.small_floats import SMALL_FLOATS, dtype_named, is_number, is_numpys, is_small_float

BYTES = np.dtype("S")  # the dtype of a leaf of bytes, of any length
STR = np.dtype("U")  # the dtype of a leaf of text, of any length


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the numpy dtype for a dtype of numpy or torch, or for its name.

    >>> as_dtype("float32"), as_dtype(bytes).kind, as_dtype("torch.int64")
    (dtype('float32'), 'S', dtype('int64'))
    """
    found = dtype if isinstance(dtype, np.dtype) else _named(dtype)
    if not is_numpys(found) and not is_small_float(found):
        raise _unknown(dtype)
    if found.kind in "SU":
        return BYTES if found.kind == "S" else STR
    if found.kind == "O":
        raise SpecError(f"dtype must be a number, bool, bytes or str type, got {dtype!r} (Python objects).")
    return found


def _named(dtype: Any) -> np.dtype[Any]:
    name = str(dtype)
    try:
        # The name identifies a torch dtype, so that this module needs no torch.
        is_name = isinstance(dtype, str) or name.startswith("torch.")
        return dtype_named(name.removeprefix("torch.")) if is_name else np.dtype(dtype)
    except TypeError:
        raise _unknown(dtype) from None


def _unknown(dtype: Any) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"dtype must be one that numpy knows, or one of {', '.join(sorted(SMALL_FLOATS))} (numpy, torch or text), got "
        f"{dtype!r}. Other types are made on the device, in the step."
    )


@dataclass(frozen=True, slots=True, init=False)
class TensorSpec:
    """Shape and dtype of one leaf (tf.TensorSpec).

    Args:
        shape: One number per dimension, None for an unknown one; None for an unknown rank.
        dtype: A dtype of numpy or torch, or its name; `bytes` and `str` for leaves of any length.

    Attributes:
        shape: A tuple, or None for an unknown rank.
        dtype: The numpy dtype.

    Raises:
        InvalidArgumentError: Neither numpy nor ml_dtypes knows the dtype.
        SpecError: The dtype stands for Python objects.

    >>> TensorSpec((None, 28), "float32")
    TensorSpec(shape=(None, 28), dtype=float32)
    """

    __nest_leaf__: ClassVar[bool] = True  # a dataclass, but one leaf of a nest of specs
    shape: tuple[int | None, ...] | None
    dtype: np.dtype[Any]

    def __init__(self, shape: Any = (), dtype: Any = np.float32) -> None:
        dims = None if shape is None else tuple(None if dim is None else int(dim) for dim in shape)
        object.__setattr__(self, "shape", dims)
        object.__setattr__(self, "dtype", as_dtype(dtype))

    def __repr__(self) -> str:
        name = {"S": "bytes", "U": "str"}.get(self.dtype.kind, self.dtype.name)
        return f"{type(self).__name__}(shape={self.shape}, dtype={name})"

    @property
    def is_fixed(self) -> bool:
        """Return True if every dimension is known."""
        return self.shape is not None and None not in self.shape

    @property
    def num_bytes(self) -> int | None:
        """Bytes of a leaf; None if a dimension is unknown or the leaf holds no numbers.

        >>> TensorSpec((28, 28), "uint8").num_bytes
        784
        """
        known = [dim for dim in self.shape or () if dim is not None]
        return self.dtype.itemsize * math.prod(known) if self.is_fixed and is_number(self.dtype) else None

    def accepts(self, other: TensorSpec) -> bool:
        """Return True if every leaf of spec `other` matches this spec.

        Args:
            other: Any spec. If a dimension is known here and unknown there, the result is False.

        >>> TensorSpec((None,), "int64").accepts(TensorSpec((3,), "int64"))
        True
        """
        if self.dtype != other.dtype:
            return False
        if self.shape is None:
            return True
        if other.shape is None or len(self.shape) != len(other.shape):
            return False
        return all(mine is None or mine == theirs for mine, theirs in zip(self.shape, other.shape, strict=True))

    def batched(self, size: int | None) -> TensorSpec:
        """Return this spec with a leading dimension.

        Args:
            size: Length of the dimension; None if unknown.

        >>> TensorSpec((28,), "float32").batched(None)
        TensorSpec(shape=(None, 28), dtype=float32)
        """
        return TensorSpec(None if self.shape is None else (size, *self.shape), self.dtype)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class ObjectSpec(TensorSpec):
    """A leaf that blocks hold as a Python object. Operations on arrays of numbers or text refuse it."""

    def refused(self, operation: str) -> SpecError:
        """Return the error of an operation that needs tensors.

        Args:
            operation: Name of the operation.
        """
        return SpecError(
            f"The elements of {operation} must be tensors, got {self}. Take that leaf out in a map before."
        )

    def batched(self, size: int | None) -> TensorSpec:
        raise self.refused("batch")


@final
@dataclass(frozen=True, slots=True, init=False, repr=False)
class ReplicatedSpec(ObjectSpec):
    """A leaf of a batch that goes whole to every replica: `rd.Replicated`. Shape and dtype belong to the value."""


@final
@dataclass(frozen=True, slots=True, init=False, repr=False)
class RaggedSpec(ObjectSpec):
    """A leaf of a batch that is a list of tensors (`ragged_batch`): (entries, dimensions of each entry)."""

    @property
    def is_fixed(self) -> bool:
        return False

    def refused(self, operation: str) -> SpecError:
        return SpecError(
            f"The elements of {operation} must be tensors, got a list of tensors, {self}. Do this before ragged_batch, "
            "or call unbatch() first."
        )


@final
@dataclass(frozen=True, slots=True, init=False, repr=False)
class CollatedSpec(ObjectSpec):
    """A batch that a `collate` function makes when the batch is handed out, or a leaf of it that is no tensor."""

    def __init__(self) -> None:
        object.__setattr__(self, "shape", None)
        object.__setattr__(self, "dtype", np.dtype(object))

    def refused(self, operation: str) -> SpecError:
        return refused_collated(operation)


def refused_collated(operation: str) -> SpecError:
    """Return the error of an operation on the elements of a batch with `collate`."""
    return SpecError(
        f"What batch(collate=) makes must be the last look into elements, as replicas collate their own parts, got "
        f"{operation} after it. Do that in the collate function, or before the batch."
    )


@final
@dataclass(frozen=True, slots=True, init=False)
class DatasetSpec(ObjectSpec):
    """A leaf that is itself a dataset (tf.data.DatasetSpec), such as a window.

    Args:
        element_spec: Nest of specs of that dataset's elements; None if not determined.

    Attributes:
        element_spec: The argument.

    >>> DatasetSpec(TensorSpec((), "int64")).element_spec
    TensorSpec(shape=(), dtype=int64)
    """

    element_spec: Any

    def __init__(self, element_spec: Any = None) -> None:
        object.__setattr__(self, "shape", ())
        object.__setattr__(self, "dtype", np.dtype(object))
        object.__setattr__(self, "element_spec", element_spec)

    def refused(self, operation: str) -> SpecError:
        return SpecError(
            f"The elements of {operation} must be tensors, got datasets (windows, or what a function of map returned). "
            "Take them apart first: flat_map(lambda ds: ds.batch(n))."
        )


def most_specific_common(first: TensorSpec, second: TensorSpec) -> TensorSpec | None:
    """Return the narrowest spec that accepts both, or None if dtypes differ."""
    if first == second:
        return first
    if isinstance(first, DatasetSpec) and isinstance(second, DatasetSpec):
        return _common_dataset(first.element_spec, second.element_spec)
    if first.dtype != second.dtype or type(first) is not type(second):
        return None
    if first.shape is None or second.shape is None or len(first.shape) != len(second.shape):
        return first if first.shape == second.shape else type(first)(None, first.dtype)
    dims = tuple(a if a == b else None for a, b in zip(first.shape, second.shape, strict=True))
    return type(first)(dims, first.dtype)


def _common_dataset(first: Any, second: Any) -> DatasetSpec | None:
    if first is None or second is None:
        return DatasetSpec()
    mine, structure = flatten_element(first)
    theirs, other = flatten_element(second)
    if structure != other:
        return None
    specs = [most_specific_common(a, b) for a, b in zip(mine, theirs, strict=True)]
    return None if None in specs else DatasetSpec(unflatten(structure, specs))


def spec_of_value(value: Any) -> TensorSpec:
    """Return the spec of a leaf as transformations see it: a numpy array or scalar, bytes or str."""
    if isinstance(value, bytes):
        return TensorSpec((), BYTES)
    if isinstance(value, str):
        return TensorSpec((), STR)
    if value.dtype.kind == "O":
        kinds = {type(item) for item in value.flat}
        if kinds <= {bytes}:
            return TensorSpec(value.shape, BYTES)
        if kinds <= {str}:
            return TensorSpec(value.shape, STR)
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise SpecError(f"A leaf must hold numbers, bools, bytes or str, got an object array of {names}.")
    return TensorSpec(value.shape, value.dtype)
