"""Features of a tf.train.Example whose rows differ in length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np

from raydist.errors import InvalidArgumentError
from raydist.pipelines.elements.spec import as_dtype
from raydist.pipelines.tf_example.features import feature_dtype

__all__ = ["RaggedFeature", "RaggedTensorValue", "RowPartition"]

_INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


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
