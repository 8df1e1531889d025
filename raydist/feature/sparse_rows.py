"""Values of a categorical feature, any number of them in each row, from arrays, lists, ragged and sparse tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.feature.fingerprint import fingerprint64, fingerprint_cat64
from raydist.pipelines.elements.columns import object_column
from raydist.pipelines.tf_example.features import SparseTensorValue
from raydist.pipelines.tf_example.ragged_features import RaggedTensorValue

Array = np.ndarray[Any, Any]


@final
@dataclass(frozen=True, slots=True)
class SparseRows:
    """Values of rows: row i has `values[splits[i] : splits[i + 1]]`.

    Attributes:
        values: An array of numbers, or strings as an Arrow dictionary array.
        splits: Starts and ends of rows.
        places: For values from a dense array: for each of its entries True if the entry is among the values. None if
            the feature was ragged or sparse.
    """

    values: Any
    splits: Array
    places: Array | None = None

    @classmethod
    def of(cls, feature: Any, key: str, *, are_numbers: bool = False) -> Self:
        """Return the rows of a feature of a batch; a dense array of shape (n,) or (n, k) has n rows.

        Raises:
            SpecError: The feature holds something else than integers or strings (numbers), or has another shape.
        """
        flat, splits, is_dense = _flatten(feature, key)
        array = _array(flat)
        if are_numbers and array.dtype.kind not in "iuf":
            raise SpecError(f"Values of {key!r} must be numbers, got {array.dtype}. Convert them in a map.")
        values = array if are_numbers else _values(array, key)
        return cls(values, splits, np.ones(len(values), bool) if is_dense and len(values) else None)

    @property
    def num_rows(self) -> int:
        return len(self.splits) - 1

    @property
    def counts(self) -> Array:
        """Number of values of each row."""
        return np.diff(self.splits)

    @property
    def row_numbers(self) -> Array:
        """For each value the row that it is in."""
        return np.repeat(np.arange(self.num_rows), self.counts)

    @property
    def is_text(self) -> bool:
        return isinstance(self.values, pa.DictionaryArray)

    def with_values(self, values: Array) -> Self:
        """Return the same rows with other values."""
        return replace(self, values=values)

    def without_missing(self) -> Self:
        """Drop the entries of a dense array that stand for no value: -1, or an empty string."""
        if self.places is None:
            return self
        kept = self.map(lambda texts: pc.binary_length(texts).to_numpy() > 0) if self.is_text else self.values != -1
        return self if kept.all() else self.kept(kept)

    def kept(self, places: Array) -> Self:
        """Return the values in these places of a dense array."""
        values = self.values.filter(pa.array(places)) if self.is_text else self.values[places]
        return replace(self, values=values, splits=np.append(0, np.cumsum(places))[self.splits], places=places)

    def map(self, fn: Callable[[Any], Array]) -> Array:
        """Apply a function to the different values, and return its results for all of them."""
        if self.is_text:
            distinct, places = self.values.dictionary, self.values.indices.to_numpy()
        else:
            distinct, places = np.unique(self.values, return_inverse=True)
        results: Array = fn(distinct)[places]
        return results

    def padded(self, filler: Any) -> Array:
        """Return an array (rows, most values), at least one value wide: the entries of a dense array keep their place.

        >>> SparseRows.of([[3], [1, 2], []], "x").padded(-1).tolist()
        [[3, -1], [1, 2], [-1, -1]]
        """
        if self.places is not None:
            result = np.full(len(self.places), filler, self.values.dtype)
            result[self.places] = self.values
            return result.reshape(self.num_rows, -1)
        width = int(max(1, self.counts.max(initial=1)))
        result = np.full((self.num_rows, width), filler, self.values.dtype)
        result[np.arange(width) < self.counts[:, np.newaxis]] = self.values
        return result


def _flatten(feature: Any, key: str) -> tuple[Any, Array, bool]:
    """Return values in one sequence, the splits, and True if the feature is a dense array."""
    if isinstance(feature, SparseTensorValue):
        indices, shape = np.asarray(feature.indices), np.asarray(feature.dense_shape)
        if len(shape) != 2:
            raise SpecError(f"A sparse feature must have two dimensions, {key!r} has the shape {shape.tolist()}.")
        return feature.values, np.searchsorted(indices[:, 0], np.arange(shape[0] + 1)), False
    if isinstance(feature, RaggedTensorValue):
        if isinstance(feature.values, RaggedTensorValue):
            raise SpecError(f"A ragged feature must have one level of rows, {key!r} has more. Flatten it in a map.")
        return feature.values, np.asarray(feature.row_splits, np.int64), False
    if rows := _lists(feature):
        odd = [row for row in rows if isinstance(row, str | bytes) or not hasattr(row, "__len__")]
        if odd:
            raise SpecError(
                f"Each row of {key!r} must be a list or an array, as the first one is, got {odd[0]!r:.80}. Write "
                "[value] for one value, and [] for none."
            )
        splits = np.cumsum([0, *map(len, rows)])
        full = [_array(row) for row in rows if len(row)]  # an empty row may have any dtype
        return np.concatenate(full) if full else np.zeros(0, np.int64), splits, False
    array = _array(feature)
    if array.ndim not in (1, 2):
        raise SpecError(
            f"A categorical feature of a batch must have the shape (rows,) or (rows, values), {key!r} has "
            f"{array.shape}. Batch the dataset first, or call transform(features, batched=False) for one element."
        )
    width = 1 if array.ndim == 1 else array.shape[1]
    return array.ravel(), np.arange(len(array) + 1) * width, True


def _lists(feature: Any) -> list[Any]:
    """Return the rows of a feature that is a list, or an object array, of rows; an empty list for other features."""
    is_list = isinstance(feature, list) or (isinstance(feature, np.ndarray) and feature.dtype == object)
    if is_list and len(feature) and not isinstance(feature[0], str | bytes) and np.ndim(feature[0]) == 1:
        return list(feature) if not (isinstance(feature, np.ndarray) and feature.ndim > 1) else []
    return []


def _array(values: Any) -> Array:
    if isinstance(values, list) and values and isinstance(values[0], str | bytes):
        return object_column(values)
    return np.asarray(values)


def _values(array: Array, key: str) -> Any:
    if array.dtype.kind in "iu" or not len(array):  # without values, a list has the dtype of floats
        return array.astype(np.int64)
    if array.dtype.kind not in "OSU":
        raise SpecError(f"Values of {key!r} must be integers or strings, got {array.dtype}. Convert them in a map.")
    try:
        texts = pa.array(array.tolist(), pa.large_binary())
    except (pa.ArrowException, UnicodeError, TypeError) as error:
        raise SpecError(f"Values of {key!r} must be integers, bytes or valid str, got others: {error}.") from error
    if texts.null_count:
        raise SpecError(f"Values of {key!r} must be integers, bytes or valid str, got None. Replace it in a map by ''.")
    return texts.dictionary_encode()


def hash_buckets(distinct: Any, num_buckets: int) -> Array:
    """Return the bucket of each string, or of each integer by its decimal string, as TensorFlow numbers them.

    Source: tf.strings.to_hash_bucket_fast.

    >>> hash_buckets(pa.array([b"a", b"d"], pa.large_binary()), 10).tolist(), hash_buckets(np.array([7]), 10).tolist()
    ([9, 5], [8])
    """
    texts = distinct if isinstance(distinct, pa.Array) else pa.array(distinct.astype("S20"), pa.large_binary())
    return (fingerprint64(texts) % np.uint64(num_buckets)).astype(np.int64)


def crossed(parts: Sequence[SparseRows], hash_key: int, name: str) -> SparseRows:
    """Return the fingerprints of all combinations of values, one of each part, in every row; the last varies fastest.

    Source: tf.sparse.cross_hashed.
    """
    num_rows = parts[0].num_rows
    owners, hashes = np.arange(num_rows), np.full(num_rows, hash_key, np.uint64)
    for part in parts:
        if part.num_rows != num_rows:
            raise InvalidArgumentError(
                f"Features of {name!r} must have one number of rows, got {part.num_rows} and {num_rows}."
            )
        counts = part.counts[owners]
        first = np.repeat(np.arange(len(owners)), counts)
        within = np.arange(len(first)) - np.repeat(np.cumsum(counts) - counts, counts)
        second = part.splits[owners[first]] + within
        values = part.map(fingerprint64) if part.is_text else part.values.astype(np.uint64)
        owners, hashes = owners[first], fingerprint_cat64(hashes[first], values[second])
    return SparseRows(hashes, np.searchsorted(owners, np.arange(num_rows + 1)))
