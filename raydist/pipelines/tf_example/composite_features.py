"""Features of a tf.train.Example that are made of several lists, or of lists of differing lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np

from raydist.errors import InvalidArgumentError
from raydist.pipelines.elements.spec import as_dtype
from raydist.pipelines.tf_example.features import (
    FixedLenFeature,
    VarLenFeature,
    feature_dtype,
    fixed_shape,
    typed_default,
)

__all__ = [
    "Feature",
    "FixedLenSequenceFeature",
    "RowPartition",
    "RaggedFeature",
    "RaggedTensorValue",
    "SparseFeature",
    "SparseTensorValue",
]

_INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


@final
class SparseTensorValue(NamedTuple):
    """A tensor of which few values are given (tf.compat.v1.SparseTensorValue): what a :class:`SparseFeature` becomes.

    `torch.sparse_coo_tensor(indices.T, values, tuple(dense_shape))` makes a torch tensor of it.

    Attributes:
        indices: Where the k values stand, int64 of shape (k, rank), in ascending order.
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


@final
class RaggedTensorValue(NamedTuple):
    """Rows of differing lengths (tf.compat.v1.ragged.RaggedTensorValue): what a :class:`RaggedFeature` becomes.

    They stand one behind the other: row i is `values[row_splits[i] : row_splits[i + 1]]`.
    `torch.nested.nested_tensor_from_jagged(values, row_splits)` makes a torch tensor of it.

    Attributes:
        values: All values, of shape (k,), or a RaggedTensorValue where the rows are rows of rows.
        row_splits: Where rows begin and end: 0, ..., k, of shape (rows + 1,); int32 or int64, as the feature says.

    Source: tf.compat.v1.ragged.RaggedTensorValue (TensorFlow 2.x API).

    >>> ragged = RaggedTensorValue(np.array([3, 1, 4]), np.array([0, 2, 2, 3]))
    >>> [row.tolist() for row in np.split(ragged.values, ragged.row_splits[1:-1])]
    [[3, 1], [], [4]]
    """

    values: Any
    row_splits: Any


@final
@dataclass(frozen=True, slots=True, init=False, eq=False)
class FixedLenSequenceFeature:
    """A feature with a multiple of the values of one item (tf.io.FixedLenSequenceFeature).

    Parsed into an array of shape (k, *shape) for k items; for a batch of n records into one of shape
    (n, longest, *shape), filled up with `default_value`.

    Args:
        shape: Of one item, all dimensions known and >= 1; () for one value, one number for a vector.
        dtype: int64, float32 or bytes, given as numpy, torch or text.
        allow_missing: Must be True: a record without the feature has no items.
        default_value: One value that fills short rows up; 0 or b"" by default.

    Attributes:
        shape: As a tuple.
        dtype: As numpy's.
        default_value: An array of shape ().

    Raises:
        InvalidArgumentError: An argument out of its range.

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
        """Values of one item: the product of the dimensions.

        >>> FixedLenSequenceFeature((2, 3), "int64", allow_missing=True).num_values
        6
        """
        return int(np.prod(self.shape, dtype=np.int64))


@final
@dataclass(frozen=True, slots=True, init=False)
class SparseFeature:
    """A sparse tensor whose indices and values are features of their own (tf.io.SparseFeature).

    Parsed into a :class:`SparseTensorValue` of shape `size`; for a batch of n records of shape (n, *size).

    Args:
        index_key: The feature of int64 that holds the indices; one for each dimension.
        value_key: The feature that holds the values, as many as there are indices.
        dtype: Of the values: int64, float32 or bytes, given as numpy, torch or text.
        size: Of each dimension: indices must be below.
        already_sorted: Indices are known to ascend, and need not be sorted.

    Attributes:
        index_keys: The features of the indices, one for each dimension.
        value_key: As given.
        dtype: As numpy's.
        sizes: Of the dimensions, as many as there are index keys.
        already_sorted: As given.

    Raises:
        InvalidArgumentError: As many sizes as index keys are needed, each >= 1.

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


@final
@dataclass(frozen=True, slots=True)
class RowPartition:
    """How one level of a RaggedFeature is cut into rows. Made by the methods of :class:`RaggedFeature`.

    Attributes:
        kind: What the numbers say: "row_splits", "row_lengths", ... or "uniform_row_length".
        key: The feature of int64 that holds the numbers; "" for a uniform length.
        length: The uniform length.
    """

    kind: str
    key: str = ""
    length: int = 0


@final
@dataclass(frozen=True, slots=True, init=False)
class RaggedFeature:
    """A feature with rows of differing lengths (tf.io.RaggedFeature).

    Without partitions a record is one row: parsed into an array of shape (k,), for a batch into a
    :class:`RaggedTensorValue` with one row a record. Each partition adds a level of rows inside.

    TensorFlow's tf.io.RaggedFeature.RowSplits and its siblings are classes; here they are functions.

    Args:
        dtype: Of the values: int64, float32 or bytes, given as numpy, torch or text.
        value_key: The feature that holds the values; None for the one of the name that is asked for.
        partitions: How the values of a record are cut, outermost first: `RaggedFeature.RowSplits(key)`,
            `RowLengths(key)`, `RowStarts(key)`, `RowLimits(key)`, `ValueRowIds(key)` or `UniformRowLength(length)`.
        row_splits_dtype: Of `row_splits`: int32 or int64.

    Attributes:
        dtype: As numpy's.
        value_key: As given.
        partitions: As a tuple.
        row_splits_dtype: As numpy's.

    Raises:
        InvalidArgumentError: A partition or a dtype that is none of these.

    Source: tf.io.RaggedFeature (TensorFlow 2.x API).

    >>> RaggedFeature("int64", partitions=[RaggedFeature.RowLengths("lengths")]).partitions
    (RowPartition(kind='row_lengths', key='lengths', length=0),)
    """

    dtype: np.dtype[Any]
    value_key: str | None
    partitions: tuple[RowPartition, ...]
    row_splits_dtype: np.dtype[Any]

    def __init__(
        self,
        dtype: Any,
        value_key: str | None = None,
        partitions: Sequence[RowPartition] = (),
        row_splits_dtype: Any = "int32",
    ) -> None:
        if not all(isinstance(partition, RowPartition) for partition in partitions):
            raise InvalidArgumentError(
                f"partitions must be made by RaggedFeature.RowSplits(key) and its siblings, got {partitions!r}."
            )
        splits_dtype = as_dtype(row_splits_dtype)
        if splits_dtype not in _INDEX_DTYPES:
            raise InvalidArgumentError(f"row_splits_dtype must be int32 or int64, got {row_splits_dtype!r}.")
        object.__setattr__(self, "dtype", feature_dtype(dtype))
        object.__setattr__(self, "value_key", value_key)
        object.__setattr__(self, "partitions", tuple(partitions))
        object.__setattr__(self, "row_splits_dtype", splits_dtype)

    @staticmethod
    def RowSplits(key: str) -> RowPartition:
        """Rows begin and end at these numbers: 0, ..., all values.

        Args:
            key: The int64 feature of these numbers: one number more than rows.

        Returns:
            One of the `partitions` of a RaggedFeature.

        Source: tf.io.RaggedFeature.RowSplits (TensorFlow 2.x API).

        >>> RaggedFeature.RowSplits("splits")
        RowPartition(kind='row_splits', key='splits', length=0)
        """
        return RowPartition("row_splits", key)

    @staticmethod
    def RowLengths(key: str) -> RowPartition:
        """Values of each row.

        Args:
            key: The int64 feature of these numbers: one for each row, >= 0; their sum is the number of values.

        Returns:
            One of the `partitions` of a RaggedFeature.

        Source: tf.io.RaggedFeature.RowLengths (TensorFlow 2.x API).

        >>> RaggedFeature.RowLengths("lengths")
        RowPartition(kind='row_lengths', key='lengths', length=0)
        """
        return RowPartition("row_lengths", key)

    @staticmethod
    def RowStarts(key: str) -> RowPartition:
        """Where each row begins.

        Args:
            key: The int64 feature of these numbers: one for each row, ascending; the first is 0.

        Returns:
            One of the `partitions` of a RaggedFeature.

        Source: tf.io.RaggedFeature.RowStarts (TensorFlow 2.x API).

        >>> RaggedFeature.RowStarts("starts")
        RowPartition(kind='row_starts', key='starts', length=0)
        """
        return RowPartition("row_starts", key)

    @staticmethod
    def RowLimits(key: str) -> RowPartition:
        """Where each row ends.

        Args:
            key: The int64 feature of these numbers: one for each row, ascending; the last is the number of values.

        Returns:
            One of the `partitions` of a RaggedFeature.

        Source: tf.io.RaggedFeature.RowLimits (TensorFlow 2.x API).

        >>> RaggedFeature.RowLimits("limits")
        RowPartition(kind='row_limits', key='limits', length=0)
        """
        return RowPartition("row_limits", key)

    @staticmethod
    def ValueRowIds(key: str) -> RowPartition:
        """The row of each value, ascending.

        Args:
            key: The int64 feature of these numbers: one for each value, >= 0 and ascending.

        Returns:
            One of the `partitions` of a RaggedFeature.

        Source: tf.io.RaggedFeature.ValueRowIds (TensorFlow 2.x API).

        >>> RaggedFeature.ValueRowIds("rows")
        RowPartition(kind='value_rowids', key='rows', length=0)
        """
        return RowPartition("value_rowids", key)

    @staticmethod
    def UniformRowLength(length: int) -> RowPartition:
        """Every row has `length` values.

        Args:
            length: Values of a row, >= 1; the values of a record must be a multiple.

        Returns:
            One of the `partitions` of a RaggedFeature.

        Raises:
            InvalidArgumentError: `length` < 1.

        Source: tf.io.RaggedFeature.UniformRowLength (TensorFlow 2.x API).

        >>> RaggedFeature.UniformRowLength(3)
        RowPartition(kind='uniform_row_length', key='', length=3)
        """
        if length < 1:
            raise InvalidArgumentError(f"UniformRowLength needs a length >= 1, got {length!r}.")
        return RowPartition("uniform_row_length", length=length)


Feature = FixedLenFeature | FixedLenSequenceFeature | VarLenFeature | SparseFeature | RaggedFeature
