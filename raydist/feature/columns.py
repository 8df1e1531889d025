"""Feature columns that give numbers, and what all columns have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, final

import numpy as np

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.feature.settings import AdaptedBoundaries, require_count
from raydist.feature.sparse_rows import Array, SparseRows
from raydist.pipelines.elements.spec import as_dtype
from raydist.pipelines.tf_example.features import FixedLenFeature, VarLenFeature

COMBINERS = ("mean", "sqrtn", "sum")
Ids = tuple[SparseRows, SparseRows | None]
"""Ids of rows, and their weights."""


@final
class FeatureBatch:
    """Features of one batch, and what columns made of them: a column that several others contain computes once."""

    def __init__(self, features: Mapping[str, Any]) -> None:
        self._features = features
        self._results: dict[tuple[Any, str], Any] = {}

    def feature(self, key: str) -> Any:
        """Return a feature as it was given."""
        if key not in self._features:
            known = ", ".join(map(repr, self._features))
            raise InvalidArgumentError(f"The features must have {key!r}, got {known}. Add it in a map, or rename it.")
        return self._features[key]

    def rows(self, key: str) -> SparseRows:
        """Return the values of a categorical feature."""
        rows: SparseRows = self._once((key, "rows"), lambda: SparseRows.of(self.feature(key), key))
        return rows

    def transformed(self, column: FeatureColumn) -> Any:
        """Return the result of a column's `transform`."""
        return self._once((id(column), "transform"), lambda: column.transform(self))

    def ids(self, column: CategoricalColumn) -> Ids:
        """Return the result of a column's `ids`."""
        ids: Ids = self._once((id(column), "ids"), lambda: column.ids(self))
        return ids

    def _once(self, place: tuple[Any, str], make: Callable[[], Any]) -> Any:
        if place not in self._results:
            self._results[place] = make()
        return self._results[place]


class FeatureColumn(ABC):
    """A feature column. Subclasses are frozen dataclasses that check their fields."""

    @property
    @abstractmethod
    def name(self) -> str:
        """TensorFlow's name of the column."""

    @property
    def parts(self) -> tuple[Any, ...]:
        """The columns, or keys of features of strings, that the column is made of."""
        values = (getattr(self, each.name) for each in fields(self))  # type: ignore[arg-type]  # a dataclass
        return tuple(value for value in values if isinstance(value, FeatureColumn))

    @property
    def parse_example_spec(self) -> dict[str, Any]:
        """The features of a tf.train.Example that the column reads, for `rd.parse_example`."""
        specs = (part.parse_example_spec if isinstance(part, FeatureColumn) else text_spec(part) for part in self.parts)
        return {key: feature for spec in specs for key, feature in spec.items()}

    @abstractmethod
    def transform(self, batch: FeatureBatch) -> Any:
        """Return an array with a row for each row of the batch; for ids with weights a dict of two.

        Args:
            batch: The features.
        """

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]  # a dataclass


class CategoricalColumn(FeatureColumn):
    """A column of ids from 0 to `num_buckets` - 1, any number of them in each row.

    Attributes:
        num_buckets: Number of ids.
    """

    num_buckets: int

    @abstractmethod
    def ids(self, batch: FeatureBatch) -> Ids:
        """Return the ids of each row, negative for a value without an id, and their weights if they have any.

        Args:
            batch: The features.
        """

    def transform(self, batch: FeatureBatch) -> Any:
        """Return int64 (rows, most ids), padded with -1; with weights a dict of "ids" and "weights".

        Args:
            batch: The features.
        """
        ids, weights = batch.ids(self)
        return ids.padded(-1) if weights is None else {"ids": ids.padded(-1), "weights": weights.padded(0)}


@final
@dataclass(frozen=True)
class NumericColumn(FeatureColumn):
    """Numbers: a feature of shape (rows, *shape), or (rows,) for one number.

    Args:
        key: Name of the feature, and of the column.
        shape: Shape of the feature in one row; a number n stands for (n,).
        default_value: What `make_parse_example_spec` gives for a missing feature: one value, or an array of `shape`.
        dtype: Dtype in a tf.train.Example. Results are float32, or float64 if this is float64.
        normalizer_fn: Function of the feature as a float64 array; a `Normalization`, say.

    Raises:
        InvalidArgumentError: An argument is out of its range.

    Source: tf.feature_column.numeric_column.

    >>> price = rd.feature.numeric_column("price", normalizer_fn=np.log10)
    >>> rd.feature.FeatureSpace([price]).transform({"price": np.array([1, 100])})["price"].tolist()
    [[0.0], [2.0]]
    """

    key: str
    shape: Any = (1,)
    default_value: Any = None
    dtype: Any = "float32"
    normalizer_fn: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        require_key(self.key)
        shape = tuple(self.shape) if isinstance(self.shape, tuple | list) else (self.shape,)
        if not shape or not all(isinstance(size, int) and size >= 1 for size in shape):
            raise InvalidArgumentError(f"shape of {self.key!r} must hold integers >= 1, got {self.shape!r}.")
        if self.normalizer_fn is not None and not callable(self.normalizer_fn):
            raise InvalidArgumentError(f"normalizer_fn must be a function or None, got {self.normalizer_fn!r:.100}.")
        default = FixedLenFeature(
            shape, number_feature(dtype := number_dtype(self.dtype)), self.default_value
        ).default_value
        set_fields(
            self, shape=shape, dtype=dtype, default_value=None if default is None else _as_tuples(default.tolist())
        )

    @property
    def name(self) -> str:
        return self.key

    @property
    def parse_example_spec(self) -> dict[str, Any]:
        return {self.key: FixedLenFeature(self.shape, number_feature(self.dtype), self.default_value)}

    def transform(self, batch: FeatureBatch) -> Array:
        values = numbers(batch.feature(self.key), self.key)
        if values.ndim == 1 and np.prod(self.shape) == 1:
            values = values.reshape(-1, *self.shape)
        if values.ndim == 0 or values.shape[1:] != self.shape:
            raise SpecError(
                f"{self.key!r} must have the shape {('rows', *self.shape)}, got {values.shape}. Give the column's "
                "shape=, or batch the dataset first."
            )
        return float_array(values if self.normalizer_fn is None else self.normalizer_fn(values), self.dtype)


@final
@dataclass(frozen=True)
class BucketizedColumn(CategoricalColumn):
    """The buckets that numbers lie in; bucket i begins with boundary i - 1, which is part of it.

    It is a categorical column (in a linear model, in crosses), and `rd.DenseFeatures` takes it one-hot. Numbers and
    boundaries are compared in the source column's dtype, float32 by default.

    Args:
        source_column: A `numeric_column` of one dimension; each of its values has buckets of its own.
        boundaries: Rising numbers, or an `AdaptedBoundaries`.

    Raises:
        InvalidArgumentError: The source is another column, or the boundaries do not rise.

    Source: tf.feature_column.bucketized_column.

    >>> column = rd.feature.bucketized_column(rd.feature.numeric_column("age"), [18, 65])
    >>> rd.feature.FeatureSpace([column]).transform({"age": np.array([5, 18, 70])})["age_bucketized"].tolist()
    [[0], [1], [2]]
    """

    source_column: NumericColumn
    boundaries: Sequence[float] | AdaptedBoundaries

    def __post_init__(self) -> None:
        source, given = self.source_column, self.boundaries
        if not isinstance(source, NumericColumn) or len(source.shape) != 1:
            raise InvalidArgumentError(f"source_column must be a numeric_column of one dimension, got {source!r:.100}.")
        if not isinstance(given, AdaptedBoundaries):
            boundaries = tuple(map(float, given)) if isinstance(given, tuple | list) else ()
            if not boundaries or not (np.diff(boundaries) > 0).all():
                raise InvalidArgumentError(f"boundaries must be a list of rising numbers, got {given!r:.100}.")
            set_fields(self, boundaries=boundaries)

    @property
    def name(self) -> str:
        return f"{self.source_column.name}_bucketized"

    @property
    def num_buckets(self) -> int:  # type: ignore[override]  # a field elsewhere
        """Number of ids."""
        return int(self.source_column.shape[0]) * (len(known(self, self.boundaries)) + 1)

    def transform(self, batch: FeatureBatch) -> Array:
        """Return the bucket of each value, int64 (rows, values)."""
        boundaries = float_array(known(self, self.boundaries), self.source_column.dtype)
        buckets: Array = np.searchsorted(boundaries, batch.transformed(self.source_column), side="right")
        return buckets

    def ids(self, batch: FeatureBatch) -> Ids:
        buckets = batch.transformed(self)
        first_ids = np.arange(buckets.shape[1]) * (len(known(self, self.boundaries)) + 1)
        return SparseRows.of(buckets + first_ids, self.name), None


@final
@dataclass(frozen=True)
class IndicatorColumn(FeatureColumn):
    """The number of times each id occurs in a row, or the sum of its weights: float32 (rows, num_buckets).

    Args:
        categorical_column: A categorical column.

    Raises:
        InvalidArgumentError: It is another column.

    Source: tf.feature_column.indicator_column.

    >>> word = rd.feature.categorical_column_with_vocabulary_list("word", ["bob", "wanda"])
    >>> space = rd.feature.FeatureSpace([rd.feature.indicator_column(word)])
    >>> space.transform({"word": [["bob", "bob"], ["wanda"], []]})["word_indicator"].tolist()
    [[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
    """

    categorical_column: CategoricalColumn

    def __post_init__(self) -> None:
        require_categorical(self.categorical_column)

    @property
    def name(self) -> str:
        return f"{self.categorical_column.name}_indicator"

    def transform(self, batch: FeatureBatch) -> Array:
        ids, weights = batch.ids(self.categorical_column)
        there = ids.values >= 0
        amounts = np.float32(1) if weights is None else weights.values[there]
        result = np.zeros((ids.num_rows, self.categorical_column.num_buckets), amounts.dtype)
        np.add.at(result, (ids.row_numbers[there], ids.values[there]), amounts)
        return result


@final
@dataclass(frozen=True)
class EmbeddingColumn(FeatureColumn):
    """Ids whose rows of a table `rd.DenseFeatures` learns and combines.

    Args:
        categorical_column: A categorical column.
        dimension: Number of values in a row of the table.
        combiner: How several ids of a row are combined, with their weights: "sum", "mean" (divided by the sum of the
            weights), or "sqrtn" (by the root of the sum of their squares). An example without ids gives zeros.
        initializer: Function that fills the table, a tensor, such as those of `torch.nn.init`. Default: normal with a
            standard deviation of 1 / sqrt(dimension), cut at two of them.
        max_norm: Rows that are longer are scaled to this length where they are used.
        trainable: False for a table that stays as it is.
        sharded: The table is an `rd.ShardedEmbedding`, for more rows than fit; its initial values are not cut.

    Raises:
        InvalidArgumentError: An argument is out of its range, or an initializer is given for a sharded table.

    Source: tf.feature_column.embedding_column.

    >>> import torch
    >>> user = rd.feature.categorical_column_with_hash_bucket("user", 1000)
    >>> space = rd.feature.FeatureSpace([rd.feature.embedding_column(user, 4)])
    >>> batch = space.transform({"user": ["ann", "bob"]})
    >>> rd.DenseFeatures(space)({name: torch.tensor(value) for name, value in batch.items()}).shape
    torch.Size([2, 4])
    """

    categorical_column: CategoricalColumn
    dimension: int
    combiner: str = "mean"
    initializer: Callable[[Any], Any] | None = None
    max_norm: float | None = None
    trainable: bool = True
    sharded: bool = False

    def __post_init__(self) -> None:
        require_categorical(self.categorical_column)
        require_count("dimension", self.dimension)
        if self.combiner not in COMBINERS:
            raise InvalidArgumentError(f"combiner must be one of {', '.join(COMBINERS)}, got {self.combiner!r}.")
        if self.initializer is not None and (self.sharded or not callable(self.initializer)):
            raise InvalidArgumentError(
                f"initializer must be a function that fills a tensor, and None with sharded=True, got "
                f"{self.initializer!r:.100} with sharded={self.sharded}."
            )

    @property
    def name(self) -> str:
        return f"{self.categorical_column.name}_embedding"

    def transform(self, batch: FeatureBatch) -> Any:
        """Return what the categorical column's `transform` returns."""
        return batch.transformed(self.categorical_column)


def make_parse_example_spec(feature_columns: Iterable[FeatureColumn]) -> dict[str, Any]:
    """Return the features that `rd.parse_example` must read for columns.

    Args:
        feature_columns: The columns.

    Raises:
        InvalidArgumentError: Two columns need different descriptions of one feature.

    Source: tf.feature_column.make_parse_example_spec.

    >>> rd.feature.make_parse_example_spec([rd.feature.numeric_column("age")])
    {'age': FixedLenFeature(shape=(1,), dtype=float32, default_value=None)}
    """
    found: dict[str, Any] = {}
    for column in feature_columns:
        for key, feature in column.parse_example_spec.items():
            if repr(found.setdefault(key, feature)) != repr(feature):
                raise InvalidArgumentError(
                    f"Columns must agree on the feature {key!r}, got {found[key]} and {feature}. Parse it twice."
                )
    return found


def distinct_columns(columns: Iterable[Any]) -> list[FeatureColumn]:
    """Return columns and those they contain, each object once, parts before the whole."""
    found: dict[int, FeatureColumn] = {}
    for column in columns:
        if isinstance(column, FeatureColumn):
            found |= {id(each): each for each in (*distinct_columns(column.parts), column) if id(each) not in found}
    return list(found.values())


def numbers(feature: Any, key: str) -> Array:
    """Return a dense feature of numbers as float64."""
    try:
        values = np.asarray(feature)
    except ValueError:  # rows of different lengths
        values = np.zeros(0, object)
    if values.dtype.kind not in "iufb":
        raise SpecError(f"{key!r} must be an array of numbers, got {feature!r:.80}. Convert it in a map.")
    return values.astype(np.float64)


def float_array(values: Any, dtype: str) -> Array:
    """Return an array as float64 for this dtype, else as float32."""
    return np.asarray(values).astype("float64" if dtype == "float64" else "float32")


def number_dtype(dtype: Any) -> str:
    """Return the name of a dtype of numbers."""
    found = as_dtype(dtype)
    if found.kind not in "iuf":
        raise InvalidArgumentError(f"dtype must be an integer or floating one, got {dtype!r}.")
    return found.name


def number_feature(dtype: str) -> str:
    """Return the dtype that a tf.train.Example has for numbers of this dtype."""
    return "float32" if dtype.startswith("float") else "int64"


def text_spec(key: str) -> dict[str, Any]:
    """Return the description of a feature of strings, any number of them."""
    return {key: VarLenFeature(bytes)}


def set_fields(column: FeatureColumn, **values: Any) -> None:
    """Set fields of a frozen column that is being made."""
    for name, value in values.items():
        object.__setattr__(column, name, value)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def require_key(key: Any) -> None:
    """Raise InvalidArgumentError unless this can be the name of a feature."""
    if not isinstance(key, str) or not key:
        raise InvalidArgumentError(f"The key of a feature must be a str that is not empty, got {key!r:.100}.")


def require_categorical(column: Any) -> None:
    """Raise InvalidArgumentError unless this is a categorical column."""
    if not isinstance(column, CategoricalColumn):
        raise InvalidArgumentError(
            "categorical_column must be made by categorical_column_with_..., crossed_column or bucketized_column, got "
            f"{column!r:.100}."
        )


def known(column: FeatureColumn, value: Any) -> tuple[Any, ...]:
    """Return a setting that adapt may have to find first."""
    if not isinstance(value, tuple):
        raise InvalidArgumentError(
            f"The column {column.name!r} must be adapted to data. Call FeatureSpace.adapt first."
        )
    return value
