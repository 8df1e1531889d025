"""Statistics of features over one pass over the data, and the settings of columns that they give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, final

import numpy as np
import pyarrow as pa

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.feature.categorical import VocabularyColumn
from raydist.feature.columns import (
    BucketizedColumn,
    FeatureBatch,
    FeatureColumn,
    NumericColumn,
    distinct_columns,
    numbers,
)
from raydist.feature.settings import AdaptedBoundaries, AdaptedVocabulary, Normalization
from raydist.feature.sparse_rows import Array

_MOST_VALUES, _FEWER_VALUES = 1 << 17, 1 << 15
_MOST_TERMS = 1_000_000
_BUFFERED = 1 << 16


def adapted_columns(columns: Iterable[FeatureColumn], elements: Iterable[Mapping[str, Any]]) -> list[FeatureColumn]:
    """Return columns with the settings that they ask for; `elements` are not read if there are none."""
    statistics = {id(column): found for column in distinct_columns(columns) if (found := _statistic(column))}
    num_elements = 0
    for features in elements if statistics else ():
        num_elements += 1
        batch = FeatureBatch(features)
        for statistic in statistics.values():
            statistic.update(batch)
    if statistics and not num_elements:
        raise InvalidArgumentError("The data must have an element, got none.")
    adapted: dict[int, FeatureColumn] = {}
    for column in distinct_columns(columns):
        whole = _with_parts(column, adapted)
        adapted[id(column)] = statistics[id(column)].adapted(whole) if id(column) in statistics else whole
    return [adapted[id(column)] for column in columns]


def _with_parts(column: FeatureColumn, adapted: Mapping[int, FeatureColumn]) -> FeatureColumn:
    """Return a column with adapted columns in it; the same object if they are the same."""

    def new(value: Any) -> Any:
        return tuple(map(new, value)) if isinstance(value, tuple) else adapted.get(id(value), value)

    values = {name: getattr(column, name, None) for name in ("source_column", "categorical_column", "keys")}
    changed = {name: new(value) for name, value in values.items() if value is not None and new(value) != value}
    return replace(column, **changed) if changed else column  # type: ignore[type-var]  # a dataclass


def _statistic(column: FeatureColumn) -> Moments | Quantiles | TermCounts | None:
    """Return the statistic that a column asks for: `update` adds a batch, `adapted` returns the column with it."""
    match column:
        case NumericColumn(normalizer_fn=Normalization(mean=None)):
            return Moments(column)
        case BucketizedColumn(boundaries=AdaptedBoundaries()):
            return Quantiles(column.source_column)
        case VocabularyColumn(vocabulary_list=AdaptedVocabulary()):
            return TermCounts(column)
    return None


def _vectors(column: NumericColumn, batch: FeatureBatch) -> Array:
    values = numbers(batch.feature(column.key), column.key)
    if values.size % np.prod(column.shape) or np.isinf(values).any():
        raise InvalidArgumentError(
            f"Values of {column.key!r} must be finite, and of the shape {column.shape}, got an array of "
            f"{values.shape} with {int(np.isinf(values).sum())} infinite values."
        )
    return values.reshape(-1, *column.shape)


@final
class Moments:
    """Mean and variance of each value of a numeric column, in float64, without NaN."""

    def __init__(self, column: NumericColumn) -> None:
        self._column = column
        self._counts, self._means, self._squares = np.zeros((3, int(np.prod(column.shape))))

    def update(self, batch: FeatureBatch) -> None:
        values = _vectors(self._column, batch).reshape(-1, len(self._counts))
        there = ~np.isnan(values)
        counts = there.sum(0)
        means = np.where(there, values, 0).sum(0) / np.maximum(counts, 1)
        deviations, away = np.where(there, values - means, 0), means - self._means
        totals = np.maximum(self._counts + counts, 1)
        # Chan's formula for the joint moments of two samples.
        self._squares += (deviations**2).sum(0) + away**2 * self._counts * counts / totals
        self._means += away * counts / totals
        self._counts += counts

    def adapted(self, column: Any) -> Any:
        variances = self._squares / np.maximum(self._counts, 1)
        return replace(column, normalizer_fn=Normalization(tuple(self._means), tuple(variances)))


_Weighted = tuple[Array, Array]
"""Different values in rising order, and how many values each stands for."""
_NONE: _Weighted = (np.zeros(0), np.zeros(0))


@final
class Quantiles:
    """Quantiles of the values of a numeric column, without NaN.

    All values are kept while there are at most `most` different ones. More become a block of `fewer` values, which
    stand for as many values each; two blocks of one level become a block of the next level. Each of these steps moves
    ranks by at most half of what one value stands for.
    """

    def __init__(self, column: NumericColumn, most: int = _MOST_VALUES, fewer: int = _FEWER_VALUES) -> None:
        self._column, self._most, self._fewer = column, most, fewer
        self._is_normalized_later = column.normalizer_fn == Normalization()
        if self._is_normalized_later and column.shape != (1,):
            raise InvalidArgumentError(
                f"Boundaries of {column.key!r} must be adapted to values that are normalized alike, got the shape "
                f"{column.shape} and Normalization(). Bucketize a numeric_column without it."
            )
        self._new: list[Array] = []
        self._num_new = 0
        self._block = _NONE
        self._levels: list[_Weighted] = []  # _NONE where a level has no block

    def update(self, batch: FeatureBatch) -> None:
        values, normalizer = _vectors(self._column, batch), self._column.normalizer_fn
        if normalizer is not None and not self._is_normalized_later:
            values = np.asarray(normalizer(values), np.float64)
        self._new.append(values[~np.isnan(values)])
        self._num_new += values.size
        if self._num_new > _BUFFERED:
            self._take_in()

    def _take_in(self) -> None:
        new = np.unique(np.concatenate([np.zeros(0), *self._new]), return_counts=True)
        self._new, self._num_new = [], 0
        self._block = _merged(self._block, new)
        if len(self._block[0]) <= self._most:
            return
        block, self._block, level = _pruned(self._block, self._fewer), _NONE, 0
        while level < len(self._levels) and len(self._levels[level][0]):
            block = _pruned(_merged(self._levels[level], block), self._fewer)
            self._levels[level], level = _NONE, level + 1
        self._levels[level : level + 1] = [block]

    def at(self, probabilities: Array) -> tuple[Array, Array]:
        """Return `numpy.quantile` of all values, or with blocks the values of about these ranks; and what is kept."""
        self._take_in()
        values, counts = self._block
        for block in self._levels:
            values, counts = _merged((values, counts), block)
        ends = np.append(np.cumsum(counts), np.inf)
        values = np.append(values, values[-1:])
        if not len(values):
            return values, values
        if self._levels:
            return values[np.searchsorted(ends, probabilities * ends[-2])], values
        places = probabilities * (ends[-2] - 1)
        share = places - np.floor(places)
        low, high = (values[np.searchsorted(ends, np.floor(places) + step, side="right")] for step in (0, 1))
        # As numpy rounds it: from the nearer end.
        return np.where(share < 0.5, low + (high - low) * share, high - (high - low) * (1 - share)), values

    def adapted(self, column: Any) -> Any:
        count = column.boundaries.num_buckets
        found, values = self.at(np.arange(1, count) / count)
        if not len(values):
            raise InvalidArgumentError(f"The data must have a value of {self._column.key!r}, got none, or NaN alone.")
        found = found[found > values[0]] if found[-1] > values[0] else values[1:2]  # else most are the smallest one
        found = np.unique(found)
        if self._is_normalized_later:
            found = np.unique(column.source_column.normalizer_fn(found))
        return replace(column, boundaries=tuple(found.tolist()))


def _merged(first: _Weighted, second: _Weighted) -> _Weighted:
    values, inverse = np.unique(np.concatenate([first[0], second[0]]), return_inverse=True)
    return values, np.bincount(inverse, np.concatenate([first[1], second[1]]), len(values))


def _pruned(block: _Weighted, count: int) -> _Weighted:
    ends = np.cumsum(block[1])
    middles = (np.arange(count) + 0.5) * (ends[-1] / count)
    values, counts = np.unique(block[0][np.searchsorted(ends, middles)], return_counts=True)
    return values, counts * (ends[-1] / count)


@final
class TermCounts:
    """Counts of the terms of a feature; with more than `most` different ones, of the frequent ones."""

    def __init__(self, column: VocabularyColumn, most: int = _MOST_TERMS) -> None:
        self._column, self._most = column, most
        self._counts: Counter[Any] = Counter()

    def update(self, batch: FeatureBatch) -> None:
        rows = self._column.rows(batch)
        if rows.is_text:
            used, counts = np.unique(rows.values.indices.to_numpy(), return_counts=True)
            terms = rows.values.dictionary.take(pa.array(used)).to_pylist()
        else:
            different, counts = np.unique(rows.values, return_counts=True)
            terms = different.tolist()
        if terms and self._counts and type(terms[0]) is not type(next(iter(self._counts))):
            raise SpecError(f"Values of {self._column.key!r} must be all strings, or all integers, got both.")
        self._counts.update(dict(zip(terms, counts.tolist(), strict=True)))
        if len(self._counts) > self._most:
            # Take from all counts the one in the middle, as Misra and Gries do, and drop terms that have none left.
            middle = sorted(self._counts.values(), reverse=True)[self._most // 2]
            self._counts = Counter({term: count - middle for term, count in self._counts.items() if count > middle})

    def adapted(self, column: Any) -> Any:
        wanted = column.vocabulary_list
        kept = sorted((-count, term) for term, count in self._counts.items() if count >= wanted.min_count)
        if not kept:
            raise InvalidArgumentError(f"The data must have a term of {column.key!r}, got none for {wanted}.")
        return replace(column, vocabulary_list=tuple(term for _, term in kept[: wanted.max_terms]))
