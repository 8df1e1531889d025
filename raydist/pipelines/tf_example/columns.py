"""Columns of wanted features, filled record by record or for many records at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from raydist.errors import InvalidArgumentError
from raydist.pipelines.elements.blocks import object_column
from raydist.pipelines.tf_example.features import FeatureArray, FixedLenFeature, column_dtype, list_field

__all__ = ["FeatureColumn", "FixedColumn", "RaggedColumn"]

_TYPE_NAMES = {"int64_list": "int64", "float_list": "float32", "bytes_list": "bytes"}


class FeatureColumn(ABC):
    """The column of one feature, with one row per record."""

    def __init__(self, name: str, dtype: np.dtype[Any]) -> None:
        self.name = name
        self.kind = list_field(dtype)
        self._dtype = column_dtype(dtype)

    @abstractmethod
    def add(self, found: Any, index: int) -> None:
        """Set the row of record `index` from the record's feature map `found`."""

    @abstractmethod
    def accepts(self, num_values: int) -> bool:
        """Return True if `num_values` values make a row."""

    @abstractmethod
    def fill(self, rows: Any, values: FeatureArray) -> None:
        """Set the rows of the records `rows` from `values`: one line each, with an accepted number of values."""

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


@final
class FixedColumn(FeatureColumn):
    """A column whose rows have one shape."""

    def __init__(self, name: str, feature: FixedLenFeature, num_records: int) -> None:
        super().__init__(name, feature.dtype)
        self._feature = feature
        self._num_values = feature.num_values
        self._rows = np.empty((num_records, *feature.shape), self._dtype)

    def add(self, found: Any, index: int) -> None:
        values = getattr(found[self.name], self.kind).value
        if len(values) != self._num_values or not values and self._is_missing(found, index):
            self._rows[index] = self._default(found, index, len(values))
        elif self._feature.shape == ():
            self._rows[index] = values[0]
        else:
            self._rows[index] = self._vector(values).reshape(self._feature.shape)

    def accepts(self, num_values: int) -> bool:
        return num_values == self._num_values

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


@final
class RaggedColumn(FeatureColumn):
    """A column with any number of values per record."""

    def __init__(self, name: str, dtype: np.dtype[Any], num_records: int) -> None:
        super().__init__(name, dtype)
        self._rows: list[FeatureArray] = [np.empty(0, self._dtype)] * num_records

    def add(self, found: Any, index: int) -> None:
        values = getattr(found[self.name], self.kind).value
        if not values:
            self._is_missing(found, index)
        self._rows[index] = self._vector(values)

    def accepts(self, num_values: int) -> bool:
        return True

    def fill(self, rows: Any, values: FeatureArray) -> None:
        for row, line in zip(rows, values, strict=True):
            self._rows[row] = line

    def rows(self) -> Sequence[FeatureArray]:
        """Return the rows, each of shape (k,)."""
        return self._rows

    def array(self) -> FeatureArray:
        return object_column(self._rows)
