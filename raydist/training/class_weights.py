"""`class_weight` of `fit`: weights of rows by their class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, final

import torch

from raydist.errors import InvalidArgumentError, SpecError
from raydist.training.elements import Example

__all__ = ["ClassWeights"]


@final
@dataclass(frozen=True, slots=True)
class ClassWeights:
    """The weight of a row of each class, as pairs; rows of all other classes have weight 1.

    >>> bool(ClassWeights()), ClassWeights.parse({1: 3.0}).of(torch.tensor([0, 1])).tolist()
    (False, [1.0, 3.0])
    """

    pairs: tuple[tuple[int, float], ...] = ()

    @classmethod
    def parse(cls, class_weight: Mapping[int, float] | None) -> ClassWeights:
        """Parse `class_weight`. Raise InvalidArgumentError unless it maps class numbers, from 0, to weights."""
        if class_weight is None:
            return cls()
        if not isinstance(class_weight, Mapping) or not class_weight:
            raise InvalidArgumentError(f"class_weight must be a dict of class and weight, got {class_weight!r:.80}.")
        for number, weight in class_weight.items():
            if not (isinstance(number, Integral) and number >= 0 and _is_weight(weight)):
                raise InvalidArgumentError(
                    f"class_weight must give numbers >= 0 for classes 0, 1, ..., got {number!r}: {weight!r}."
                )
        return cls(tuple((int(number), float(weight)) for number, weight in class_weight.items()))

    def __bool__(self) -> bool:
        return bool(self.pairs)

    def weigh(self, example: Example) -> Example:
        """Return the batch with the weights of its rows, if there are any."""
        return replace(example, sample_weight=self.of(example.y)) if self.pairs else example

    def of(self, y: Any) -> torch.Tensor:
        """Return row weights for class numbers (n,) or (n, 1), or scores (n, classes), of which the largest counts.

        Raises:
            SpecError: The targets have another form.
        """
        if not isinstance(y, torch.Tensor) or y.ndim not in (1, 2):
            shown = f"shape {tuple(y.shape)}" if isinstance(y, torch.Tensor) else type(y).__name__
            raise SpecError(
                f"class_weight needs targets that are class numbers (n,), or scores of classes (n, classes), got "
                f"{shown}. Give each row its weight yourself: elements (x, y, sample_weight)."
            )
        classes = y if y.ndim == 1 else y.reshape(-1) if y.shape[1] == 1 else y.argmax(dim=1)
        weights = torch.ones(classes.shape, dtype=torch.float64, device=y.device)
        for number, weight in self.pairs:
            weights.masked_fill_(classes == number, weight)
        return weights


def _is_weight(value: Any) -> bool:
    try:
        return math.isfinite(value) and value >= 0
    except TypeError:
        return False
