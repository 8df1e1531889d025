"""Settings of columns that `FeatureSpace.adapt` finds in data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from raydist.core.errors import InvalidArgumentError

_EPSILON = 1e-7  # Keras's


def require_count(name: str, value: Any, least: int = 1) -> None:
    """Raise InvalidArgumentError unless this is an integer of at least `least`."""
    if not isinstance(value, int) or not least <= value < 2**63:
        raise InvalidArgumentError(f"{name} must be an int >= {least}, got {value!r:.100}.")


@final
@dataclass(frozen=True)
class Normalization:
    """A `normalizer_fn` that subtracts the mean and divides by the standard deviation.

    `FeatureSpace.adapt` fills in what is None: the mean and the variance of each value of the column over the data, in
    float64. NaN does not count. A standard deviation below 1e-7 is taken for 1e-7.

    Args:
        mean: A number, or one for each value of the column.
        variance: The same.

    Raises:
        InvalidArgumentError: Only one of both is given, or a variance is negative.

    Source: tf.keras.layers.Normalization.

    >>> rd.feature.Normalization(mean=3.0, variance=4.0)(np.array([[3.0], [7.0]])).tolist()
    [[0.0], [2.0]]
    """

    mean: float | Sequence[float] | None = None
    variance: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        if (self.mean is None) != (self.variance is None):
            raise InvalidArgumentError(
                f"mean and variance must be given both, or none of them, got {self.mean} and {self.variance}."
            )
        for name in ("mean", "variance"):
            value = getattr(self, name)
            if value is not None:  # as a tuple, so that the object can be hashed
                object.__setattr__(self, name, tuple(np.asarray(value, np.float64).ravel().tolist()))
        if self.variance is not None and not (np.asarray(self.variance) >= 0).all():
            raise InvalidArgumentError(f"A variance must be >= 0, got {self.variance}.")

    def __call__(self, values: Any) -> Any:
        """Normalize a batch.

        Args:
            values: An array with a first axis of rows.

        Raises:
            InvalidArgumentError: The mean is not known yet.
        """
        if self.mean is None or self.variance is None:
            raise InvalidArgumentError("A Normalization must be adapted to data. Call FeatureSpace.adapt first.")
        array = np.asarray(values, np.float64)
        shape = array.shape[1:] if np.size(self.mean) > 1 else ()
        deviation = np.maximum(np.sqrt(np.reshape(self.variance, shape)), _EPSILON)
        return (array - np.reshape(self.mean, shape)) / deviation


@final
@dataclass(frozen=True)
class AdaptedBoundaries:
    """Boundaries that `FeatureSpace.adapt` finds, so that each bucket gets about as many values of the data.

    They are `numpy.quantile` of the values at 1 / n, 2 / n, ... for n buckets, without equal ones and without the
    smallest value; if nothing is left, the next larger value. NaN does not count. They are exact for up to 131,072
    different values. With more, memory stays at about 10 MB, and the rank of each boundary is off by at most 0.03 % (of
    10^9 values).

    Args:
        num_buckets: Number of buckets, >= 2; fewer if boundaries are equal.

    Raises:
        InvalidArgumentError: There are less than two buckets.

    Source: tf.keras.layers.Discretization.adapt.

    >>> age = rd.feature.numeric_column("age")
    >>> space = rd.feature.FeatureSpace([rd.feature.bucketized_column(age, rd.feature.AdaptedBoundaries(2))])
    >>> space.adapt([{"age": np.array([10, 20, 30, 40])}]).columns[0].boundaries
    (25.0,)
    """

    num_buckets: int

    def __post_init__(self) -> None:
        require_count("num_buckets", self.num_buckets, least=2)


@final
@dataclass(frozen=True)
class AdaptedVocabulary:
    """A vocabulary that `FeatureSpace.adapt` finds: the terms of the data, frequent ones first.

    Equally frequent terms are in the order of their characters, or numbers. Counts are exact for up to 1,000,000
    different terms. With more, rare terms are forgotten, and a count is too low by at most 2 / 10^6 of all values.

    Args:
        max_terms: Keep so many at most.
        min_count: Keep what occurs so often at least.

    Raises:
        InvalidArgumentError: A number is < 1.

    Source: tf.keras.layers.StringLookup.adapt.

    >>> column = rd.feature.categorical_column_with_vocabulary_list("word", rd.feature.AdaptedVocabulary(max_terms=2))
    >>> rd.feature.FeatureSpace([column]).adapt([{"word": ["c", "b", "c", "a"]}]).columns[0].vocabulary_list
    ('c', 'a')
    """

    max_terms: int | None = None
    min_count: int = 1

    def __post_init__(self) -> None:
        require_count("max_terms", 1 if self.max_terms is None else self.max_terms)
        require_count("min_count", self.min_count)
