"""Descriptions of the features of a tf.train.Example, but for ragged ones: shape, dtype and default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from raydist.core.errors import InvalidArgumentError
from raydist.pipelines.elements.spec import BYTES, as_dtype

FeatureArray = np.ndarray[Any, Any]
"""Values of a feature: int64 or float32, or bytes as Python objects."""

LIST_FIELDS = {np.dtype(np.int64): "int64_list", np.dtype(np.float32): "float_list", BYTES: "bytes_list"}


def feature_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the dtype of a feature's values. Raises InvalidArgumentError if an Example cannot hold it."""
    found = as_dtype(dtype)
    if found not in LIST_FIELDS:
        raise InvalidArgumentError(
            f"A feature's dtype must be int64, float32 or bytes (what a tf.train.Example holds), got {dtype!r}. "
            "Parse as one of these and convert afterwards."
        )
    return found


def fixed_shape(shape: Any, owner: str, *, least: int = 0) -> tuple[int, ...]:
    """Return a shape, or one number for a vector, as a tuple. Raises InvalidArgumentError unless all are >= `least`."""
    dims = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
    if not all(isinstance(dim, int | np.integer) and dim >= least for dim in dims):
        raise InvalidArgumentError(
            f"A {owner}'s shape must hold only numbers >= {least}, got {shape!r}. Use VarLenFeature for lengths that "
            "differ."
        )
    return tuple(int(dim) for dim in dims)


def typed_default(value: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return a value, or an array of `shape`, as an array of `shape`. Raises InvalidArgumentError for anything else."""
    try:
        array = np.asarray(value, dtype=object if dtype == BYTES else None)
        _require_kind(array, dtype, shape)
        return np.array(np.broadcast_to(array.astype(column_dtype(dtype)), shape))
    except (ValueError, TypeError) as error:
        name = "bytes" if dtype == BYTES else dtype.name
        raise InvalidArgumentError(
            f"default_value must be one {name} value or an array of shape {shape}, got {value!r}."
        ) from error


def _require_kind(array: np.ndarray[Any, Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    if array.ndim and array.shape != shape:
        raise ValueError(f"the shape is {array.shape}")
    if dtype == BYTES and not all(isinstance(item, bytes) for item in array.flat):
        raise TypeError(f"a value is no bytes: {array!r:.100}")
    if dtype != BYTES and not np.can_cast(array.dtype, dtype, "same_kind"):
        raise TypeError(f"{array.dtype} does not fit into {dtype}")


@dataclass(frozen=True, slots=True, init=False, eq=False)
class FixedLenFeature:
    """A feature with the same number of values in every record (tf.io.FixedLenFeature).

    Parsed into an array of shape `shape`: (n, *shape) for a batch of n. A record with another number of values raises
    an error.

    Args:
        shape: Shape with all dimensions known; () for one value, one number for a vector.
        dtype: int64, float32 or bytes, given as numpy, torch or text.
        default_value: Value for a missing feature: one value, or an array of `shape`. Without a default, a record that
            lacks the feature raises an error.

    Attributes:
        shape: Shape as a tuple.
        dtype: The numpy dtype.
        default_value: An array of `shape`, or None.

    Raises:
        InvalidArgumentError: A dimension is unknown or < 0, the dtype is another one, or the default does not fit.

    Source: tf.io.FixedLenFeature (TensorFlow 2.x API).

    >>> FixedLenFeature((2,), "float32", default_value=0)
    FixedLenFeature(shape=(2,), dtype=float32, default_value=[0.0, 0.0])
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    default_value: np.ndarray[Any, Any] | None

    def __init__(self, shape: Any, dtype: Any, default_value: Any = None) -> None:
        found, dims = feature_dtype(dtype), fixed_shape(shape, type(self).__name__)
        default = None if default_value is None else typed_default(default_value, found, dims)
        object.__setattr__(self, "shape", dims)
        object.__setattr__(self, "dtype", found)
        object.__setattr__(self, "default_value", default)

    def __repr__(self) -> str:
        name = "bytes" if self.dtype == BYTES else self.dtype.name
        default = None if self.default_value is None else self.default_value.tolist()
        return f"FixedLenFeature(shape={self.shape}, dtype={name}, default_value={default})"

    @property
    def num_values(self) -> int:
        """Number of values of one record: the product of the dimensions.

        >>> FixedLenFeature((28, 28), "int64").num_values
        784
        """
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True, init=False)
class VarLenFeature:
    """A feature with any number of values, including none (tf.io.VarLenFeature).

    Parsed into an array of shape (k,), where k differs from record to record. For a batch: an object array of n such
    arrays, where TensorFlow returns a SparseTensor. A record without the feature gives an array of shape (0,).

    Args:
        dtype: int64, float32 or bytes, given as numpy, torch or text.

    Attributes:
        dtype: The numpy dtype.

    Raises:
        InvalidArgumentError: The dtype is another one.

    Source: tf.io.VarLenFeature (TensorFlow 2.x API).

    >>> VarLenFeature("int64")
    VarLenFeature(dtype=dtype('int64'))
    """

    dtype: np.dtype[Any]

    def __init__(self, dtype: Any) -> None:
        object.__setattr__(self, "dtype", feature_dtype(dtype))


def column_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of an array of such values: bytes of any length are in an object array."""
    return np.dtype(object) if dtype == BYTES else dtype


class SparseTensorValue(NamedTuple):
    """A sparse tensor (tf.compat.v1.SparseTensorValue): the value of a :class:`SparseFeature`.

    `torch.sparse_coo_tensor(indices.T, values, tuple(dense_shape))` returns a torch tensor.

    Attributes:
        indices: Positions of the k values, int64 of shape (k, rank), in ascending order.
        values: The values, of shape (k,): int64, float32, or bytes in an object array.
        dense_shape: Shape of the whole tensor, int64 of shape (rank,).

    Source: tf.compat.v1.SparseTensorValue (TensorFlow 2.x API).

    >>> sparse = SparseTensorValue(np.array([[0, 2], [1, 0]]), np.array([5, 6]), np.array([2, 3]))
    >>> dense = np.zeros(sparse.dense_shape, np.int64)
    >>> dense[tuple(sparse.indices.T)] = sparse.values
    >>> dense.tolist()
    [[0, 0, 5], [6, 0, 0]]
    """

    indices: Any
    values: Any
    dense_shape: Any


@dataclass(frozen=True, slots=True, init=False, eq=False)
class FixedLenSequenceFeature:
    """A feature whose number of values is a multiple of one item's (tf.io.FixedLenSequenceFeature).

    Parsed into an array of shape (k, *shape) for k items; for a batch of n records into an array of shape (n, longest,
    *shape), padded with `default_value`.

    Args:
        shape: Shape of one item, all dimensions known and >= 1; () for one value, one number for a vector.
        dtype: int64, float32 or bytes, given as numpy, torch or text.
        allow_missing: Must be True: a record without the feature has no items.
        default_value: One value that pads short rows; 0 or b"" by default.

    Attributes:
        shape: Shape as a tuple.
        dtype: The numpy dtype.
        default_value: An array of shape ().

    Raises:
        InvalidArgumentError: An argument is out of range.

    Source: tf.io.FixedLenSequenceFeature (TensorFlow 2.x API).

    >>> FixedLenSequenceFeature((2,), "int64", allow_missing=True).num_values
    2
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    default_value: np.ndarray[Any, Any]

    def __init__(self, shape: Any, dtype: Any, allow_missing: bool = False, default_value: Any = None) -> None:
        if not allow_missing:
            raise InvalidArgumentError(
                f"A FixedLenSequenceFeature must have allow_missing=True, got {allow_missing!r}: parse_example takes a "
                "record without the feature for one without items. Use FixedLenFeature for one that must be there."
            )
        found = feature_dtype(dtype)
        empty: Any = b"" if found.kind == "S" else 0
        dims = fixed_shape(shape, type(self).__name__, least=1)
        filler = typed_default(empty if default_value is None else default_value, found, ())
        object.__setattr__(self, "shape", dims)
        object.__setattr__(self, "dtype", found)
        object.__setattr__(self, "default_value", filler)

    @property
    def num_values(self) -> int:
        """Number of values of one item: the product of the dimensions.

        >>> FixedLenSequenceFeature((2, 3), "int64", allow_missing=True).num_values
        6
        """
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True, init=False)
class SparseFeature:
    """A sparse tensor whose indices and values are separate features (tf.io.SparseFeature).

    Parsed into a :class:`SparseTensorValue` of shape `size`; for a batch of n records of shape (n, *size).

    Args:
        index_key: Feature of int64 with the indices; one for each dimension.
        value_key: Feature with the values, as many as indices.
        dtype: Dtype of the values: int64, float32 or bytes, given as numpy, torch or text.
        size: Size of each dimension: indices must be smaller.
        already_sorted: True if the indices ascend, and need not be sorted.

    Attributes:
        index_keys: Features of the indices, one for each dimension.
        value_key: Feature of the values.
        dtype: The numpy dtype of the values.
        sizes: Sizes of the dimensions, one for each index key.
        already_sorted: True if the indices ascend.

    Raises:
        InvalidArgumentError: The numbers of sizes and index keys differ, or a size is < 1.

    Source: tf.io.SparseFeature (TensorFlow 2.x API).

    >>> SparseFeature("words", "counts", "int64", size=1000)
    SparseFeature(index_keys=('words',), value_key='counts', dtype=dtype('int64'), sizes=(1000,), already_sorted=False)
    """

    index_keys: tuple[str, ...]
    value_key: str
    dtype: np.dtype[Any]
    sizes: tuple[int, ...]
    already_sorted: bool

    def __init__(
        self,
        index_key: str | Sequence[str],
        value_key: str,
        dtype: Any,
        size: int | Sequence[int],
        already_sorted: bool = False,
    ) -> None:
        keys = (index_key,) if isinstance(index_key, str) else tuple(index_key)
        sizes = fixed_shape(size, type(self).__name__, least=1)
        if len(keys) != len(sizes) or not keys:
            raise InvalidArgumentError(
                f"A SparseFeature needs one size for each index key, got {len(sizes)} sizes ({size!r}) and {len(keys)} "
                f"keys ({index_key!r})."
            )
        object.__setattr__(self, "index_keys", keys)
        object.__setattr__(self, "value_key", value_key)
        object.__setattr__(self, "dtype", feature_dtype(dtype))
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "already_sorted", already_sorted)
