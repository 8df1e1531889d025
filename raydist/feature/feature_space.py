"""`rd.feature.FeatureSpace`: columns that are adapted to data, transform batches, and are saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, final

import numpy as np

from raydist.core.errors import InvalidArgumentError
from raydist.core.values import INFINITE_CARDINALITY
from raydist.feature.adaptation import adapted_columns
from raydist.feature.columns import FeatureBatch, FeatureColumn
from raydist.feature.feature_file import columns_of_file, write_columns


@final
@dataclass(frozen=True)
class FeatureSpace:
    """Columns with all that they know of the data. Immutable, and small enough to be sent to input workers.

    `transform` gives an entry for each column, named after it as in TensorFlow (`age`, `age_bucketized`,
    `word_indicator`, ...), with a row for each row of the batch:

    | column | entry |
    |---|---|
    | numeric | float32, or float64 for that dtype: (rows, *shape) |
    | bucketized | number of the bucket, int64: (rows, values) |
    | categorical, crossed, embedding | ids, int64: (rows, most ids of a row), -1 for none, and for unknown values |
    | weighted (also below an embedding) | a dict: "ids" as above, "weights" of the same shape, padded with 0 |
    | indicator | how often each id occurs, float32: (rows, num_buckets) |

    Features of categorical columns are arrays of shape (rows,) or (rows, k), in which -1 and "" stand for no value, or
    what has any number of values in each row: lists and object arrays of rows, `rd.RaggedTensorValue`,
    `rd.SparseTensorValue`.

    Args:
        columns: Columns made by the functions of `rd.feature`, with different names.

    Attributes:
        columns: The columns as a tuple.

    Raises:
        InvalidArgumentError: There is no column, something else than a column, or two columns have one name.

    Source: tf.keras.utils.FeatureSpace, tf.feature_column.

    >>> age = rd.feature.numeric_column("age", normalizer_fn=rd.feature.Normalization())
    >>> job = rd.feature.categorical_column_with_vocabulary_list("job", rd.feature.AdaptedVocabulary())
    >>> people = rd.Dataset.from_tensor_slices({"age": [20.0, 40.0, 60.0], "job": ["cook", "baker", "cook"]}).batch(2)
    >>> space = rd.feature.FeatureSpace([age, job]).adapt(people)
    >>> for batch in people.map(space.transform):
    ...     print(batch["age"].tolist(), batch["job"].tolist())
    [[-1.2247449159622192], [0.0]] [[0], [1]]
    [[1.2247449159622192]] [[0]]
    """

    columns: Sequence[FeatureColumn]

    def __post_init__(self) -> None:
        columns = tuple(self.columns) if isinstance(self.columns, Iterable) else (self.columns,)
        strange = [column for column in columns if not isinstance(column, FeatureColumn)]
        if strange or not columns:
            raise InvalidArgumentError(
                "columns must be a list of one column at least, made by functions of rd.feature, got "
                f"{(strange or columns)!r:.100}."
            )
        names = [column.name for column in columns]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise InvalidArgumentError(f"Columns must have different names, got {twice[0]!r} more than once.")
        object.__setattr__(self, "columns", columns)

    def adapt(self, dataset: Any) -> Self:
        """Return the space with the means, boundaries and vocabularies that its columns ask for.

        Reads the data once, if a column has a `Normalization()`, `AdaptedBoundaries` or `AdaptedVocabulary`. Other
        columns stay as they are. The result depends on the elements and their order alone, not on input workers.

        Args:
            dataset: A finite dataset, or any iterable, of dicts with features; batches are faster than single elements.

        Raises:
            InvalidArgumentError: The data are empty or infinite, lack a feature, or a number is infinite.
            SpecError: A feature is of the wrong kind.

        Source: tf.keras.utils.FeatureSpace.adapt.

        >>> age = rd.feature.numeric_column("age", normalizer_fn=rd.feature.Normalization())
        >>> rd.feature.FeatureSpace([age]).adapt([{"age": np.array([1.0, 3.0])}]).columns[0].normalizer_fn
        Normalization(mean=(2.0,), variance=(1.0,))
        """
        return replace(self, columns=tuple(adapted_columns(self.columns, map(self._as_batch, _elements(dataset)))))

    def transform(self, features: Mapping[str, Any], *, batched: bool | None = None) -> dict[str, Any]:
        """Return the columns' values for a batch, or for one element: its results have no axis of rows.

        Args:
            features: The features by name, as arrays or as the class lists. Others than the columns' do not matter.
            batched: False for one element. By default these are features of one element if one of them is a scalar.

        Raises:
            InvalidArgumentError: A feature is missing, a column is not adapted, or features differ in their rows.
            SpecError: A feature is of the wrong kind or shape.

        >>> words = rd.feature.categorical_column_with_hash_bucket("words", 10)
        >>> space = rd.feature.FeatureSpace([words, rd.feature.numeric_column("size")])
        >>> space.transform({"words": [["a", "d"], ["b"]], "size": np.array([1, 2])})["words"].tolist()
        [[9, 5], [2, -1]]
        >>> space.transform({"words": "d", "size": 3})
        {'words': array([5]), 'size': array([3.], dtype=float32)}
        """
        given = self._as_batch(features, batched)
        batch, batched = FeatureBatch(given), given is features
        results = {column.name: batch.transformed(column) for column in self.columns}
        counts = {name: len(_first(value)) for name, value in results.items()}
        if len(set(counts.values())) > 1:
            raise InvalidArgumentError(f"Features of a batch must have one number of rows, got {counts!s:.300}.")
        return results if batched else {name: _only(value) for name, value in results.items()}

    def _as_batch(self, features: Mapping[str, Any], batched: bool | None = None) -> Mapping[str, Any]:
        """Return the features of a batch themselves, those of one element as a batch of one row."""
        if batched is None:
            keys = {key for column in self.columns for key in column.parse_example_spec}
            batched = not any(_is_scalar(features[key]) for key in keys if key in features)
        return features if batched else _Single(features)

    def save(self, path: Any) -> None:
        """Write the columns as JSON, with all that they know of the data. Returns when the file is on disk.

        The file appears, or is replaced, as a whole. Functions are not saved, but for `Normalization`.

        Args:
            path: Local or a URI; its directory is made.

        Raises:
            InvalidArgumentError: The path names no file.

        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "features.json")
        >>> space = rd.feature.FeatureSpace([rd.feature.numeric_column("age")])
        >>> space.save(path)
        >>> rd.feature.FeatureSpace.load(path) == space
        True
        """
        write_columns(path, self.columns)

    @classmethod
    def load(cls, path: Any, custom_objects: Mapping[str, Any] | None = None) -> Self:
        """Return the space that `save` wrote. Nothing is imported or run on the file's behalf.

        Args:
            path: Local or a URI.
            custom_objects: By name of the column the functions that the space was saved with: the `normalizer_fn` of a
                numeric column, the `initializer` of an embedding column.

        Raises:
            NotFoundError: The file does not exist.
            DataLossError: The file is damaged, or of another kind.
            InvalidArgumentError: A newer raydist wrote the file, or a function is missing.

        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "features.json")
        >>> rd.feature.FeatureSpace([rd.feature.numeric_column("clicks", normalizer_fn=np.log1p)]).save(path)
        >>> space = rd.feature.FeatureSpace.load(path, custom_objects={"clicks": np.log1p})
        >>> space.transform({"clicks": np.array([0.0])})["clicks"].tolist()
        [[0.0]]
        """
        return cls(columns_of_file(path, custom_objects or {}))


class _Single(dict[str, Any]):
    """The features of one element, each as a batch of one row."""

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, str | bytes):
            return [value]
        return np.asarray(value)[np.newaxis]


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | bytes | int | float) or getattr(value, "ndim", None) == 0


def _first(value: Any) -> Any:
    return value["ids"] if isinstance(value, dict) else value


def _only(value: Any) -> Any:
    return {name: each[0] for name, each in value.items()} if isinstance(value, dict) else value[0]


def _elements(dataset: Any) -> Iterator[Mapping[str, Any]]:
    if hasattr(dataset, "cardinality") and dataset.cardinality() == INFINITE_CARDINALITY:
        raise InvalidArgumentError("The data must be finite, got an infinite dataset. Take a part: dataset.take(n).")
    for element in dataset.as_numpy_iterator() if hasattr(dataset, "as_numpy_iterator") else dataset:
        if not isinstance(element, Mapping):
            raise InvalidArgumentError(
                f"Elements must be dicts of features, got {type(element).__name__}. Drop the labels in a map: "
                "dataset.map(lambda features, label: features)."
            )
        yield element
