"""Features of a tf.train.Example whose rows have different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from raydist.core.errors import InvalidArgumentError
from raydist.pipelines.elements.spec import as_dtype
from raydist.pipelines.tf_example.features import feature_dtype

_INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


class RaggedTensorValue(NamedTuple):
    """Rows of any lengths (tf.compat.v1.ragged.RaggedTensorValue): the value of a :class:`RaggedFeature`.

    The rows are concatenated: row i is `values[row_splits[i] : row_splits[i + 1]]`.
    `torch.nested.nested_tensor_from_jagged(values, row_splits)` returns a torch tensor.

    Attributes:
        values: All values, of shape (k,), or a RaggedTensorValue for nested rows.
        row_splits: Starts and ends of rows: 0, ..., k, of shape (rows + 1,); int32 or int64, as chosen for the feature.

    Source: tf.compat.v1.ragged.RaggedTensorValue (TensorFlow 2.x API).

    >>> ragged = RaggedTensorValue(np.array([3, 1, 4]), np.array([0, 2, 2, 3]))
    >>> [row.tolist() for row in np.split(ragged.values, ragged.row_splits[1:-1])]
    [[3, 1], [], [4]]
    """

    values: Any
    row_splits: Any


@dataclass(frozen=True, slots=True)
class RowPartition:
    """The partition of one level of a RaggedFeature into rows, made by the methods of :class:`RaggedFeature`.

    Attributes:
        kind: Meaning of the numbers: "row_splits", "row_lengths", ... or "uniform_row_length".
        key: Feature of int64 with the numbers; "" for a uniform length.
        length: Uniform length.
    """

    kind: str
    key: str = ""
    length: int = 0


@dataclass(frozen=True, slots=True, init=False)
class RaggedFeature:
    """A feature with rows of different lengths (tf.io.RaggedFeature).

    Without partitions a record is one row: parsed into an array of shape (k,), for a batch into a
    :class:`RaggedTensorValue` with one row per record. Each partition adds an inner level of rows.

    TensorFlow's tf.io.RaggedFeature.RowSplits and its siblings are classes; here they are functions.

    Args:
        dtype: Dtype of the values: int64, float32 or bytes, given as numpy, torch or text.
        value_key: Feature with the values; None for the requested name.
        partitions: Partitions of a record's values, outermost first: `RaggedFeature.RowSplits(key)`, `RowLengths(key)`,
            `RowStarts(key)`, `RowLimits(key)`, `ValueRowIds(key)` or `UniformRowLength(length)`.
        row_splits_dtype: Dtype of `row_splits`: int32 or int64.

    Attributes:
        dtype: The numpy dtype of the values.
        value_key: Feature with the values, or None.
        partitions: Partitions as a tuple.
        row_splits_dtype: The numpy dtype of `row_splits`.

    Raises:
        InvalidArgumentError: A partition or a dtype is invalid.

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
        """Return a partition by the boundaries of rows: 0, ..., number of values.

        Args:
            key: Feature of int64 with the boundaries: one more than rows.

        Source: tf.io.RaggedFeature.RowSplits (TensorFlow 2.x API).

        >>> RaggedFeature.RowSplits("splits")
        RowPartition(kind='row_splits', key='splits', length=0)
        """
        return RowPartition("row_splits", key)

    @staticmethod
    def RowLengths(key: str) -> RowPartition:
        """Return a partition by the number of values of each row.

        Args:
            key: Feature of int64 with the lengths: one for each row, >= 0; their sum is the number of values.

        Source: tf.io.RaggedFeature.RowLengths (TensorFlow 2.x API).

        >>> RaggedFeature.RowLengths("lengths")
        RowPartition(kind='row_lengths', key='lengths', length=0)
        """
        return RowPartition("row_lengths", key)

    @staticmethod
    def RowStarts(key: str) -> RowPartition:
        """Return a partition by the start of each row.

        Args:
            key: Feature of int64 with the starts: one for each row, ascending; the first is 0.

        Source: tf.io.RaggedFeature.RowStarts (TensorFlow 2.x API).

        >>> RaggedFeature.RowStarts("starts")
        RowPartition(kind='row_starts', key='starts', length=0)
        """
        return RowPartition("row_starts", key)

    @staticmethod
    def RowLimits(key: str) -> RowPartition:
        """Return a partition by the end of each row.

        Args:
            key: Feature of int64 with the ends: one for each row, ascending; the last is the number of values.

        Source: tf.io.RaggedFeature.RowLimits (TensorFlow 2.x API).

        >>> RaggedFeature.RowLimits("limits")
        RowPartition(kind='row_limits', key='limits', length=0)
        """
        return RowPartition("row_limits", key)

    @staticmethod
    def ValueRowIds(key: str) -> RowPartition:
        """Return a partition by the row number of each value.

        Args:
            key: Feature of int64 with the row numbers: one for each value, >= 0 and ascending.

        Source: tf.io.RaggedFeature.ValueRowIds (TensorFlow 2.x API).

        >>> RaggedFeature.ValueRowIds("rows")
        RowPartition(kind='value_rowids', key='rows', length=0)
        """
        return RowPartition("value_rowids", key)

    @staticmethod
    def UniformRowLength(length: int) -> RowPartition:
        """Return a partition into rows of `length` values.

        Args:
            length: Values of a row, >= 1; the number of values of a record must be a multiple.

        Raises:
            InvalidArgumentError: `length` < 1.

        Source: tf.io.RaggedFeature.UniformRowLength (TensorFlow 2.x API).

        >>> RaggedFeature.UniformRowLength(3)
        RowPartition(kind='uniform_row_length', key='', length=3)
        """
        if length < 1:
            raise InvalidArgumentError(f"UniformRowLength needs a length >= 1, got {length!r}.")
        return RowPartition("uniform_row_length", length=length)
