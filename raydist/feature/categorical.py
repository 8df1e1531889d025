"""Feature columns that give ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
import pyarrow as pa

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.feature.columns import (
    CategoricalColumn,
    FeatureBatch,
    Ids,
    float_array,
    known,
    number_dtype,
    number_feature,
    require_categorical,
    require_key,
    set_fields,
    text_spec,
)
from raydist.feature.settings import AdaptedVocabulary, require_count
from raydist.feature.sparse_rows import Array, SparseRows, crossed, hash_buckets
from raydist.pipelines.elements.spec import as_dtype
from raydist.pipelines.formats.files import path_text, read_file
from raydist.pipelines.tf_example.features import VarLenFeature

_DEFAULT_HASH_KEY = 0xDECAFCAFFE  # TensorFlow's


class KeyColumn(CategoricalColumn):
    """A categorical column of one feature, after which it is named. The feature holds strings, or integers.

    Attributes:
        key: Name of the feature.
        dtype: "string" or "int64".
    """

    key: str
    dtype: Any = "int64"

    @property
    def name(self) -> str:
        return self.key

    @property
    def parse_example_spec(self) -> dict[str, Any]:
        return {self.key: VarLenFeature("int64")} if self.dtype == "int64" else text_spec(self.key)

    def rows(self, batch: FeatureBatch) -> SparseRows:
        """Return the values that are there.

        Args:
            batch: The features.

        Raises:
            SpecError: They are of the other kind.
        """
        rows = batch.rows(self.key)
        if len(rows.values) and self.dtype is not None and rows.is_text != (self.dtype == "string"):
            found = "strings" if rows.is_text else "integers"
            raise SpecError(
                f"{self.key!r} must have the dtype of its column, {self.dtype}, got {found}. Give it dtype=."
            )
        return rows.without_missing()


@final
@dataclass(frozen=True)
class HashedColumn(KeyColumn):
    """Ids by hashing: Fingerprint64 of the value's bytes, of an integer's decimals, modulo the number of buckets.

    Args:
        key: Name of the feature, and of the column.
        hash_bucket_size: Number of ids, >= 1.
        dtype: "string" for str and bytes, or an integer dtype.

    Raises:
        InvalidArgumentError: An argument is out of its range.

    Source: tf.feature_column.categorical_column_with_hash_bucket, tf.strings.to_hash_bucket_fast.

    >>> column = rd.feature.categorical_column_with_hash_bucket("word", 10)
    >>> rd.feature.FeatureSpace([column]).transform({"word": ["a", "", "d"]})["word"].tolist()
    [[9], [-1], [5]]
    """

    key: str
    hash_bucket_size: int
    dtype: Any = "string"

    def __post_init__(self) -> None:
        require_key(self.key)
        require_count("hash_bucket_size", self.hash_bucket_size)
        set_fields(self, dtype=_id_dtype(self.dtype))

    @property
    def num_buckets(self) -> int:  # type: ignore[override]  # a field elsewhere
        """Number of ids."""
        return self.hash_bucket_size

    def ids(self, batch: FeatureBatch) -> Ids:
        rows = self.rows(batch)
        return rows.with_values(rows.map(lambda distinct: hash_buckets(distinct, self.hash_bucket_size))), None


@final
@dataclass(frozen=True)
class VocabularyColumn(KeyColumn):
    """Ids by a vocabulary: the place of the value in a list.

    Args:
        key: Name of the feature, and of the column.
        vocabulary_list: The terms, strings or integers, each once; or an `AdaptedVocabulary`.
        dtype: "string" or an integer dtype; None for that of the terms.
        default_value: Id of unknown values; -1 ignores them.
        num_oov_buckets: Number of ids behind the terms' for unknown values, by their hash.

    Raises:
        InvalidArgumentError: There are no terms, a term occurs twice, terms are of different kinds, or both
            `default_value` and `num_oov_buckets` are given.

    Source: tf.feature_column.categorical_column_with_vocabulary_list.

    >>> column = rd.feature.categorical_column_with_vocabulary_list("colour", ["R", "G", "B"], num_oov_buckets=2)
    >>> rd.feature.FeatureSpace([column]).transform({"colour": ["B", "R", "pink"]})["colour"].tolist()
    [[2], [0], [3]]
    """

    key: str
    vocabulary_list: Sequence[Any] | AdaptedVocabulary
    dtype: Any = None
    default_value: int = -1
    num_oov_buckets: int = 0

    def __post_init__(self) -> None:
        require_key(self.key)
        require_count("num_oov_buckets", self.num_oov_buckets, least=0)
        if self.num_oov_buckets and self.default_value != -1:
            raise InvalidArgumentError(
                f"{self.key!r} must have num_oov_buckets or default_value, got {self.num_oov_buckets} and "
                f"{self.default_value}. Leave one of them out."
            )
        dtype = None if self.dtype is None else _id_dtype(self.dtype)
        if not isinstance(self.vocabulary_list, AdaptedVocabulary):
            terms = _terms(self.vocabulary_list, self.key)
            found = "string" if isinstance(terms[0], str) else "int64"
            if dtype not in (None, found):
                raise InvalidArgumentError(f"dtype of {self.key!r} must be that of its terms, {found}, got {dtype}.")
            dtype = found
            set_fields(self, vocabulary_list=terms)
        set_fields(self, dtype=dtype)

    @property
    def num_buckets(self) -> int:  # type: ignore[override]  # a field elsewhere
        """Number of ids."""
        return len(known(self, self.vocabulary_list)) + self.num_oov_buckets

    @cached_property
    def _numbers(self) -> dict[Any, int]:
        terms = known(self, self.vocabulary_list)
        # What is no UTF-8 stands in the str as surrogates, see _terms.
        keys = [term.encode("utf-8", "surrogateescape") if isinstance(term, str) else term for term in terms]
        return {key: number for number, key in enumerate(keys)}

    def ids(self, batch: FeatureBatch) -> Ids:
        rows, numbers = self.rows(batch), self._numbers

        def ids_of(distinct: Any) -> Array:
            terms = distinct.to_pylist() if isinstance(distinct, pa.Array) else distinct.tolist()
            ids = np.array([numbers.get(term, self.default_value) for term in terms], np.int64)
            if self.num_oov_buckets:
                hashed = len(numbers) + hash_buckets(distinct, self.num_oov_buckets)
                return np.where(ids < 0, hashed, ids)
            return ids

        return rows.with_values(rows.map(ids_of)), None


def categorical_column_with_vocabulary_file(
    key: str,
    vocabulary_file: str | Path,
    vocabulary_size: int | None = None,
    dtype: Any = "string",
    default_value: int | None = None,
    num_oov_buckets: int = 0,
) -> VocabularyColumn:
    """Return a `categorical_column_with_vocabulary_list` with the lines of a file, which is read now.

    Args:
        key: Name of the feature, and of the column.
        vocabulary_file: Path or URI of a text file with a term in each line.
        vocabulary_size: Number of lines to use; None for all.
        dtype: "string" or an integer dtype.
        default_value: Id of unknown values; None or -1 ignores them.
        num_oov_buckets: Number of ids behind the terms' for unknown values, by their hash.

    Raises:
        NotFoundError: There is no such file.
        InvalidArgumentError: It has fewer lines, a line twice, or a line that is no integer where integers are wanted.

    Source: tf.feature_column.categorical_column_with_vocabulary_file.

    >>> import pathlib, tempfile
    >>> file = pathlib.Path(tempfile.mkdtemp(), "colours.txt")
    >>> _ = file.write_text("R\\nG\\nB\\n")
    >>> rd.feature.categorical_column_with_vocabulary_file("colour", file, vocabulary_size=2).vocabulary_list
    ('R', 'G')
    """
    lines = read_file(vocabulary_file).split(b"\n")
    terms: list[Any] = [line.removesuffix(b"\r") for line in (lines[:-1] if lines[-1] == b"" else lines)]
    if vocabulary_size is not None and not 1 <= vocabulary_size <= len(terms):
        raise InvalidArgumentError(
            f"vocabulary_size must be >= 1 and at most the {len(terms)} lines of {path_text(vocabulary_file)!r}, got "
            f"{vocabulary_size}."
        )
    terms = terms[:vocabulary_size]
    if _id_dtype(dtype) == "int64":
        try:
            terms = list(map(int, terms))
        except ValueError as error:
            raise InvalidArgumentError(f"Lines of {path_text(vocabulary_file)!r} must be integers: {error}.") from None
    return VocabularyColumn(key, tuple(terms), dtype, -1 if default_value is None else default_value, num_oov_buckets)


@final
@dataclass(frozen=True)
class IdentityColumn(KeyColumn):
    """Ids that the feature has already: integers below `num_buckets`. Negative ones are ignored.

    Args:
        key: Name of the feature, and of the column.
        num_buckets: Number of ids, >= 1.
        default_value: Id of negative and of too large values. Without one, too large values are an error.

    Raises:
        InvalidArgumentError: An argument is out of its range.

    Source: tf.feature_column.categorical_column_with_identity.

    >>> column = rd.feature.categorical_column_with_identity("video", 100, default_value=0)
    >>> rd.feature.FeatureSpace([column]).transform({"video": np.array([7, 100])})["video"].tolist()
    [[7], [0]]
    """

    key: str
    num_buckets: int
    default_value: int | None = None

    def __post_init__(self) -> None:
        require_key(self.key)
        require_count("num_buckets", self.num_buckets)
        if self.default_value is not None and not 0 <= self.default_value < self.num_buckets:
            raise InvalidArgumentError(
                f"default_value of {self.key!r} must be one of the {self.num_buckets} ids, got {self.default_value}."
            )

    def ids(self, batch: FeatureBatch) -> Ids:
        rows = self.rows(batch)
        if self.default_value is not None:
            outside = (rows.values < 0) | (rows.values >= self.num_buckets)
            return rows.with_values(np.where(outside, self.default_value, rows.values)), None
        if (rows.values >= self.num_buckets).any():
            raise InvalidArgumentError(
                f"Values of {self.key!r} must be below num_buckets={self.num_buckets}, got {rows.values.max()}. "
                "Give the column more buckets, or a default_value."
            )
        return rows.with_values(np.maximum(rows.values, -1)), None


@final
@dataclass(frozen=True)
class WeightedColumn(CategoricalColumn):
    """The ids of a column, with a weight for each from another feature.

    Args:
        categorical_column: A column made by `categorical_column_with_...`.
        weight_feature_key: Name of the feature of weights: as many values in each row as the ids' feature.
        dtype: Dtype of the weights in a tf.train.Example. Results are float32, or float64 if this is float64.

    Raises:
        InvalidArgumentError: An argument is none of these.

    Source: tf.feature_column.weighted_categorical_column.

    >>> term = rd.feature.categorical_column_with_vocabulary_list("term", ["very", "model"])
    >>> space = rd.feature.FeatureSpace([rd.feature.weighted_categorical_column(term, "frequency")])
    >>> space.transform({"term": [["very", "model"], ["model"]], "frequency": [[0.5, 0.25], [1.0]]})
    {'term_weighted_by_frequency': {'ids': array([[ 0,  1],
           [ 1, -1]]), 'weights': array([[0.5 , 0.25],
           [1.  , 0.  ]], dtype=float32)}}
    """

    categorical_column: CategoricalColumn
    weight_feature_key: str
    dtype: Any = "float32"

    def __post_init__(self) -> None:
        require_categorical(self.categorical_column)
        require_key(self.weight_feature_key)
        set_fields(self, dtype=number_dtype(self.dtype))

    @property
    def name(self) -> str:
        return f"{self.categorical_column.name}_weighted_by_{self.weight_feature_key}"

    @property
    def parse_example_spec(self) -> dict[str, Any]:
        weights = {self.weight_feature_key: VarLenFeature(number_feature(self.dtype))}
        return {**self.categorical_column.parse_example_spec, **weights}

    @property
    def num_buckets(self) -> int:  # type: ignore[override]  # a field elsewhere
        """Number of ids."""
        return self.categorical_column.num_buckets

    def ids(self, batch: FeatureBatch) -> Ids:
        key = self.weight_feature_key
        ids, weights = batch.ids(self.categorical_column)[0], SparseRows.of(batch.feature(key), key, are_numbers=True)
        if weights.places is not None and ids.places is not None and len(weights.places) == len(ids.places):
            weights = weights.kept(ids.places)
        if not np.array_equal(ids.counts, weights.counts):
            raise InvalidArgumentError(
                f"{key!r} must have one value for each value of {self.categorical_column.name!r} in every row, got "
                f"{weights.counts.tolist()!s:.80} values for {ids.counts.tolist()!s:.80}."
            )
        return ids, weights.with_values(float_array(weights.values, self.dtype))


@final
@dataclass(frozen=True)
class CrossedColumn(CategoricalColumn):
    """Ids of combinations of values, one of each of several features, by hashing.

    As in TensorFlow, all combinations of a row get an id; strings go into them by their Fingerprint64, integers as they
    are, and features in dense arrays come behind the others, with empty strings and -1 among their values.

    Args:
        keys: Two at least: names of features, or categorical columns other than hashed and weighted ones. A crossed
            column among them stands for its own keys.
        hash_bucket_size: Number of ids, >= 1.
        hash_key: Another number is another hash function.

    Raises:
        InvalidArgumentError: An argument is none of these.

    Source: tf.feature_column.crossed_column.

    >>> column = rd.feature.crossed_column(["city", "job"], 1000)
    >>> batch = {"city": ["Rome", "Oslo", "Rome"], "job": ["cook", "cook", "cook"]}
    >>> rd.feature.FeatureSpace([column]).transform(batch)["city_X_job"].tolist()
    [[402], [849], [402]]
    """

    keys: Sequence[str | CategoricalColumn]
    hash_bucket_size: int
    hash_key: int | None = None

    def __post_init__(self) -> None:
        keys = tuple(self.keys) if isinstance(self.keys, tuple | list) else ()
        if len(keys) < 2:
            raise InvalidArgumentError(f"keys must be a list of two keys or columns at least, got {self.keys!r:.100}.")
        for key in keys:
            if isinstance(key, HashedColumn | WeightedColumn) or not isinstance(key, str | CategoricalColumn):
                raise InvalidArgumentError(
                    f"keys must be names of features, or categorical columns that neither hash nor weigh, got "
                    f"{key!r:.100}. Give the name of a feature instead of a column that hashes it."
                )
        require_count("hash_bucket_size", self.hash_bucket_size)
        set_fields(self, keys=keys)

    @property
    def parts(self) -> tuple[Any, ...]:
        return tuple(self.keys)

    @property
    def leaves(self) -> list[Any]:
        """The keys, with the keys of crossed columns in the place of these."""
        return [leaf for key in self.keys for leaf in (key.leaves if isinstance(key, CrossedColumn) else [key])]

    @property
    def name(self) -> str:
        return "_X_".join(sorted(leaf if isinstance(leaf, str) else leaf.name for leaf in self.leaves))

    @property
    def num_buckets(self) -> int:  # type: ignore[override]  # a field elsewhere
        """Number of ids."""
        return self.hash_bucket_size

    def ids(self, batch: FeatureBatch) -> Ids:
        # TensorFlow's kernel gets sparse and dense features as two lists, and crosses the sparse ones first.
        columns = (leaf if isinstance(leaf, str) else batch.ids(leaf)[0] for leaf in self.leaves)
        rows = [batch.rows(each) if isinstance(each, str) else replace(each, places=None) for each in columns]
        rows.sort(key=lambda each: each.places is not None)
        hashes = crossed(rows, self.hash_key or _DEFAULT_HASH_KEY, self.name)
        return hashes.with_values((hashes.values % np.uint64(self.hash_bucket_size)).astype(np.int64)), None


def _id_dtype(dtype: Any) -> str:
    kind = "S" if dtype == "string" else as_dtype(dtype).kind
    if kind not in "SUiu":
        raise InvalidArgumentError(f"dtype of a categorical column must be 'string' or an integer one, got {dtype!r}.")
    return "string" if kind in "SU" else "int64"


def _terms(given: Any, key: str) -> tuple[Any, ...]:
    plain = given.tolist() if isinstance(given, np.ndarray) else given if isinstance(given, list | tuple) else ()
    terms = tuple(term.decode("utf-8", "surrogateescape") if isinstance(term, bytes) else term for term in plain)
    is_text = bool(terms) and all(isinstance(term, str) for term in terms)
    if not is_text and not (terms and all(isinstance(term, int | np.integer) for term in terms)):
        raise InvalidArgumentError(f"vocabulary_list of {key!r} must hold strings, or integers, got {given!r:.100}.")
    terms = terms if is_text else tuple(map(int, terms))
    if len(set(terms)) < len(terms):
        raise InvalidArgumentError(
            f"The terms of {key!r} must differ, got {len(terms) - len(set(terms))} of them again."
        )
    return terms
