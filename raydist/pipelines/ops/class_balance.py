"""Probabilities of keeping an element of each class, to change the distribution of classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from raydist.errors import InvalidArgumentError

__all__ = ["ClassBalance"]

_Floats = np.ndarray[Any, np.dtype[np.float64]]
_Counts = np.ndarray[Any, np.dtype[np.int64]]

_SEEN_BEFORE = 10  # pseudo-count of each class, which smooths the estimate after few elements


@final
@dataclass(frozen=True, slots=True)
class ClassBalance:
    """A target distribution of classes, and the distribution of the input where known.

    Keeping with probability (target / initial) / max(target / initial) gives the largest share that independent choices
    per element can keep.

    Attributes:
        target: One weight per class; the sum need not be 1.
        initial: One weight per class for the input; None to estimate the weights while reading.
    """

    target: tuple[float, ...]
    initial: tuple[float, ...] | None

    @classmethod
    def of(cls, target: Any, initial: Any) -> ClassBalance:
        """Check the arguments of `rejection_resample`.

        Raises:
            InvalidArgumentError: Invalid weights, different lengths, or a wanted class that never comes.
        """
        wanted = _weights("target_dist", target)
        if initial is None:
            return cls(wanted, None)
        known = _weights("initial_dist", initial)
        if len(known) != len(wanted):
            raise InvalidArgumentError(
                "target_dist and initial_dist must have one entry for each class, got "
                f"{len(wanted)} and {len(known)} entries."
            )
        missing = [index for index, pair in enumerate(zip(wanted, known, strict=True)) if pair[0] > 0 == pair[1]]
        if missing:
            raise InvalidArgumentError(
                f"initial_dist must be > 0 where target_dist is, got 0 for class {missing[0]}, which is wanted."
            )
        return cls(wanted, known)

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.target)

    def kept(self, classes: _Counts, seen: _Counts) -> tuple[_Floats, _Counts]:
        """Return the probability of keeping each of some consecutive elements, and `seen` after them.

        Args:
            classes: Classes of the elements.
            seen: Number of earlier elements of each class.
        """
        target = np.array(self.target)
        if self.initial is not None:
            ratios = np.divide(target, self.initial, out=np.zeros_like(target), where=target > 0)
            return (ratios / ratios.max())[classes], seen
        # The estimate for an element includes the element (as in TensorFlow).
        ones = np.zeros((len(classes), self.num_classes), np.int64)
        ones[np.arange(len(classes)), classes] = 1
        counts = seen + np.cumsum(ones, axis=0)
        ratios = target / (counts + _SEEN_BEFORE)
        return ratios[np.arange(len(classes)), classes] / ratios.max(axis=1), counts[-1]


def _weights(name: str, values: Any) -> tuple[float, ...]:
    if not isinstance(values, Sequence) and not hasattr(values, "__array__"):
        raise InvalidArgumentError(f"{name} must be a list of weights, one for each class, got {values!r:.100}.")
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iuf" or not len(array):
        raise InvalidArgumentError(f"{name} must be a list of weights, one for each class, got {values!r:.100}.")
    if not np.isfinite(array).all() or array.min() < 0 or array.sum() <= 0:
        raise InvalidArgumentError(f"{name} must hold weights >= 0, not all of them 0, got {values!r:.100}.")
    return tuple(float(value) for value in array)
