"""Columns of wanted features, filled record by record or for many records at once, and outputs made from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from raydist.core.errors import InvalidArgumentError
from raydist.pipelines.elements.blocks import object_column
from raydist.pipelines.tf_example.features import (
    LIST_FIELDS,
    FeatureArray,
    FixedLenFeature,
    FixedLenSequenceFeature,
    SparseFeature,
    SparseTensorValue,
    VarLenFeature,
    column_dtype,
)
from raydist.pipelines.tf_example.ragged_features import RaggedFeature, RaggedTensorValue, RowPartition

Feature = FixedLenFeature | FixedLenSequenceFeature | VarLenFeature | SparseFeature | RaggedFeature

_TYPE_NAMES = {"int64_list": "int64", "float_list": "float32", "bytes_list": "bytes"}
_MOST_EMPTY_ROWS = 1 << 20  # limit, so that a damaged row number does not use up memory
_INT64 = np.dtype(np.int64)


class FeatureColumn(ABC):
    """The column of one feature, with one row per record of `num_values` values; None for any number."""

    def __init__(self, name: str, dtype: np.dtype[Any], num_values: int | None) -> None:
        self.name = name
        self.num_values = num_values
        self.kind = LIST_FIELDS[dtype]
        self._dtype = column_dtype(dtype)

    @abstractmethod
    def add(self, found: Any, index: int) -> None:
        """Set the row of record `index` from the record's feature map `found`."""

    @abstractmethod
    def fill(self, rows: Any, values: FeatureArray) -> None:
        """Set the rows of the records `rows` from `values`: one line each, with `num_values` values."""

    @abstractmethod
    def array(self) -> FeatureArray:
        """Return all rows."""

    @final
    def _is_missing(self, found: Any, index: int) -> bool:
        """Return True if the record has no such feature, or one without a kind. Another kind raises an error."""
        kind = found[self.name].WhichOneof("kind")
        if kind is None or kind == self.kind:
            return kind is None
        raise InvalidArgumentError(
            f"Feature {self.name!r} must hold {_TYPE_NAMES[self.kind]} values, as asked for, but record {index} "
            f"holds {_TYPE_NAMES[kind]}. Ask for that dtype."
        )

    @final
    def _vector(self, values: Any) -> FeatureArray:
        if self._dtype.kind != "O":
            return np.array(values, dtype=self._dtype)
        return object_column(values)


class FixedColumn(FeatureColumn):
    """A column whose rows have one shape."""

    def __init__(self, name: str, feature: FixedLenFeature, num_records: int) -> None:
        super().__init__(name, feature.dtype, feature.num_values)
        self._feature = feature
        self._rows = np.empty((num_records, *feature.shape), self._dtype)

    def add(self, found: Any, index: int) -> None:
        values = getattr(found[self.name], self.kind).value
        if len(values) != self.num_values or not values and self._is_missing(found, index):
            self._rows[index] = self._default(found, index, len(values))
        elif self._feature.shape == ():
            self._rows[index] = values[0]
        else:
            self._rows[index] = self._vector(values).reshape(self._feature.shape)

    def fill(self, rows: Any, values: FeatureArray) -> None:
        self._rows[rows] = values.reshape(len(values), *self._feature.shape)

    def array(self) -> FeatureArray:
        return self._rows

    def _default(self, found: Any, index: int, num_found: int) -> FeatureArray:
        """Return the default of a missing feature; raise without one, or for a wrong number of values."""
        feature = self._feature
        if not self._is_missing(found, index):
            raise InvalidArgumentError(
                f"Feature {self.name!r} must hold {feature.num_values} values (shape {feature.shape}), but record "
                f"{index} holds {num_found}. Use VarLenFeature for numbers that differ."
            )
        if feature.default_value is None:
            # The lookup of the feature has put an empty one into the map.
            present = ", ".join(sorted(set(found) - {self.name})[:20]) or "none"
            raise InvalidArgumentError(
                f"Feature {self.name!r} must be in every record, but record {index} lacks it (it has: {present}). "
                "Give the FixedLenFeature a default_value."
            )
        return feature.default_value


class RaggedColumn(FeatureColumn):
    """A column with any number of values per record. `rows` are arrays of shape (k,)."""

    def __init__(self, name: str, dtype: np.dtype[Any], num_records: int) -> None:
        super().__init__(name, dtype, None)
        self.rows: list[FeatureArray] = [np.empty(0, self._dtype)] * num_records

    def add(self, found: Any, index: int) -> None:
        values = getattr(found[self.name], self.kind).value
        if not values:
            self._is_missing(found, index)
        self.rows[index] = self._vector(values)

    def fill(self, rows: Any, values: FeatureArray) -> None:
        for row, line in zip(rows, values, strict=True):
            self.rows[row] = line

    def array(self) -> FeatureArray:
        return object_column(self.rows)


_Numbers = np.ndarray[Any, np.dtype[np.int64]]


def row_lengths(partition: RowPartition, numbers: _Numbers, num_values: int) -> _Numbers:
    """Return the number of values of each row; raises ValueError unless `numbers` split `num_values` values.

    >>> row_lengths(RowPartition("row_starts", "key"), np.array([0, 2, 2]), 5).tolist()
    [2, 0, 3]
    """
    lengths = _lengths(partition, numbers, num_values)
    if len(lengths) and lengths.min() < 0:
        raise ValueError(f"they must ascend, but a row would have {int(lengths.min())} values")
    if lengths.sum() != num_values:
        raise ValueError(f"they cover {int(lengths.sum())} values")
    return lengths


def _lengths(partition: RowPartition, numbers: _Numbers, num_values: int) -> _Numbers:
    match partition.kind:
        case "row_lengths":
            return numbers
        case "row_splits":
            return _of_splits(numbers)
        case "row_starts":
            return _of_splits(np.append(numbers, num_values) if len(numbers) else numbers)
        case "row_limits":
            return np.diff(numbers, prepend=0)
        case "value_rowids":
            return _of_row_ids(numbers, num_values)
        case _:  # uniform_row_length
            return np.full(num_values // partition.length, partition.length, np.int64)


def _of_splits(numbers: _Numbers) -> _Numbers:
    if len(numbers) and numbers[0] != 0:
        raise ValueError(f"the first must be 0, got {int(numbers[0])}")
    return np.diff(numbers)


def _of_row_ids(numbers: _Numbers, num_values: int) -> _Numbers:
    if len(numbers) and (numbers[0] < 0 or np.diff(numbers).min(initial=0) < 0):
        raise ValueError(f"they must be >= 0 and ascend, got {int(numbers.min())} .. {int(numbers.max())}")
    if len(numbers) and numbers[-1] >= _MOST_EMPTY_ROWS + num_values:
        raise ValueError(f"row {int(numbers[-1])} would follow too many empty ones")
    return np.bincount(numbers).astype(np.int64) if len(numbers) else numbers


def feature_output(name: str, feature: Feature, num_records: int) -> FeatureOutput:
    """Return the output of `feature`, with the columns that it needs."""
    if isinstance(feature, FixedLenFeature):
        return PlainOutput(FixedColumn(name, feature, num_records))
    if isinstance(feature, FixedLenSequenceFeature):
        return SequenceOutput(name, feature, num_records)
    if isinstance(feature, SparseFeature):
        return SparseOutput(name, feature, num_records)
    if isinstance(feature, RaggedFeature):
        return RaggedOutput(name, feature, num_records)
    return PlainOutput(RaggedColumn(name, feature.dtype, num_records))


class FeatureOutput(ABC):
    """The output of one wanted feature."""

    columns: Sequence[FeatureColumn]  # columns that must be filled first

    @abstractmethod
    def batch(self) -> Any:
        """Return the value for all records."""

    @abstractmethod
    def single(self) -> Any:
        """Return the value for the only record."""


class PlainOutput(FeatureOutput):
    """The column itself."""

    def __init__(self, column: FeatureColumn) -> None:
        self.columns = (column,)

    def batch(self) -> Any:
        return self.columns[0].array()

    def single(self) -> Any:
        return self.columns[0].array()[0]


class SequenceOutput(FeatureOutput):
    """Items of one shape, any number per record."""

    def __init__(self, name: str, feature: FixedLenSequenceFeature, num_records: int) -> None:
        self._feature = feature
        self._column = RaggedColumn(name, feature.dtype, num_records)
        self.columns = (self._column,)

    def batch(self) -> FeatureArray:
        rows = [self._items(row, index) for index, row in enumerate(self._column.rows)]
        longest = max(map(len, rows), default=0)
        padded = np.empty((len(rows), longest, *self._feature.shape), column_dtype(self._feature.dtype))
        padded[...] = self._feature.default_value
        for index, row in enumerate(rows):
            padded[index, : len(row)] = row
        return padded

    def single(self) -> FeatureArray:
        return self._items(self._column.rows[0], 0)

    def _items(self, row: FeatureArray, index: int) -> FeatureArray:
        if len(row) % self._feature.num_values:
            raise InvalidArgumentError(
                f"Feature {self._column.name!r} must hold a multiple of {self._feature.num_values} values (items of "
                f"shape {self._feature.shape}), but record {index} holds {len(row)}."
            )
        return row.reshape(-1, *self._feature.shape)


class SparseOutput(FeatureOutput):
    """Values with their indices."""

    def __init__(self, name: str, feature: SparseFeature, num_records: int) -> None:
        self._name = name
        self._feature = feature
        self._values = RaggedColumn(feature.value_key, feature.dtype, num_records)
        self._indices = [RaggedColumn(key, _INT64, num_records) for key in feature.index_keys]
        self.columns = (*self._indices, self._values)

    def batch(self) -> SparseTensorValue:
        rows = [self._row(index) for index in range(len(self._values.rows))]
        numbers = np.repeat(np.arange(len(rows)), [len(values) for _, values in rows]).reshape(-1, 1)
        found = np.concatenate([indices for indices, _ in rows] or [np.empty((0, len(self._indices)), np.int64)])
        shape = np.array([len(rows), *self._feature.sizes], np.int64)
        return SparseTensorValue(np.hstack([numbers, found]), _joined([v for _, v in rows], self._feature.dtype), shape)

    def single(self) -> SparseTensorValue:
        return SparseTensorValue(*self._row(0), np.array(self._feature.sizes, np.int64))

    def _row(self, index: int) -> tuple[FeatureArray, FeatureArray]:
        """Return the indices (k, rank) and values (k,) of one record."""
        values = self._values.rows[index]
        parts = [column.rows[index] for column in self._indices]
        for column, part, size in zip(self._indices, parts, self._feature.sizes, strict=True):
            self._check(column.name, part, size, len(values), index)
        indices = np.stack(parts, axis=1)
        if self._feature.already_sorted:
            return indices, values
        order = np.lexsort(parts[::-1])
        return indices[order], values[order]

    def _check(self, key: str, part: FeatureArray, size: int, num_values: int, index: int) -> None:
        if len(part) != num_values:
            raise InvalidArgumentError(
                f"Sparse feature {self._name!r} must have one index for each value, but record {index} holds "
                f"{len(part)} in {key!r} and {num_values} values in {self._feature.value_key!r}."
            )
        if len(part) and not 0 <= part.min() <= part.max() < size:
            raise InvalidArgumentError(
                f"Sparse feature {self._name!r} must have indices in [0, {size}), but record {index} holds "
                f"{int(part.min())} .. {int(part.max())} in {key!r}."
            )


class RaggedOutput(FeatureOutput):
    """Nested rows of values."""

    def __init__(self, name: str, feature: RaggedFeature, num_records: int) -> None:
        self._name = name
        self._feature = feature
        self._values = RaggedColumn(feature.value_key or name, feature.dtype, num_records)
        self._cuts = {
            level: RaggedColumn(partition.key, _INT64, num_records)
            for level, partition in enumerate(feature.partitions)
            if partition.key
        }
        self.columns = (*self._cuts.values(), self._values)

    def batch(self) -> RaggedTensorValue:
        found = self._nested(range(len(self._values.rows)))
        return RaggedTensorValue(found[0], self._splits(found[1]))

    def single(self) -> Any:
        return self._nested(range(1))[0]

    def _nested(self, records: range) -> tuple[Any, list[int]]:
        """Return the levels of rows inside the records, and the number of outermost rows of each record."""
        nested: Any = _joined([self._values.rows[index] for index in records], self._feature.dtype)
        counts = [len(self._values.rows[index]) for index in records]
        for level in reversed(range(len(self._feature.partitions))):
            lengths = [self._lengths(level, index, count) for index, count in zip(records, counts, strict=True)]
            nested = RaggedTensorValue(nested, self._splits(_joined(lengths, _INT64)))
            counts = [len(part) for part in lengths]
        return nested, counts

    def _lengths(self, level: int, index: int, num_values: int) -> FeatureArray:
        partition = self._feature.partitions[level]
        numbers = self._cuts[level].rows[index] if partition.key else np.empty(0, np.int64)
        try:
            return row_lengths(partition, numbers, num_values)
        except ValueError as error:
            raise InvalidArgumentError(
                f"Ragged feature {self._name!r} must have {partition.kind} that fit its {num_values} values, but "
                f"record {index} has {numbers.tolist()!r:.100} in {partition.key!r}: {error}."
            ) from error

    def _splits(self, lengths: Any) -> FeatureArray:
        return np.concatenate([[0], np.cumsum(lengths)]).astype(self._feature.row_splits_dtype)


def _joined(rows: Sequence[FeatureArray], dtype: np.dtype[Any]) -> FeatureArray:
    return np.concatenate([np.empty(0, column_dtype(dtype)), *rows])
