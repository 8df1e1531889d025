"""Elements of a training dataset: inputs, targets, weights; and the forward pass of a module on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, final

import torch
from torch import nn

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.nest import leaves_in, map_structure

if TYPE_CHECKING:
    from torch import nn


@final
@dataclass(frozen=True, slots=True)
class Example:
    """One batch by roles. `sample_weight` has one number per row, or is None."""

    x: Any
    y: Any
    sample_weight: Any = None


def unpack(element: Any) -> Example:
    """Return an element (or its spec) by roles: (x, y) or (x, y, sample_weight).

    >>> unpack(("images", "labels")).y
    'labels'
    """
    if isinstance(element, tuple) and len(element) in (2, 3):
        return Example(*element)
    raise SpecError(
        "Elements for fit and evaluate must be tuples (x, y) or (x, y, sample_weight), "
        f"got {_describe(element)}. Bring them into this form with dataset.map."
    )


def inputs_of(element: Any) -> Any:
    """Return the inputs of an element for predict: x itself, or the first of (x,), (x, y), (x, y, sample_weight)."""
    if not isinstance(element, tuple):
        return element
    if len(element) in (1, 2, 3):
        return element[0]
    raise SpecError(
        f"Elements for predict must be x, (x,), (x, y) or (x, y, sample_weight), got {_describe(element)}. "
        "Several inputs go together as one: ((x1, x2),)."
    )


def apply_module(module: nn.Module, x: Any) -> Any:
    """Call `module(x)`. As for functions given to `Dataset.map`, a plain tuple is unpacked into the arguments."""
    return module(*x) if type(x) is tuple else module(x)


def num_rows_of(batch: Any) -> int:
    """Return the length of the first leaf of a batch."""
    return len(leaves_in(batch)[0])


def _describe(element: Any) -> str:
    if isinstance(element, tuple):
        return f"a tuple of {len(element)}"
    if isinstance(element, dict):
        return f"a dict with the keys {sorted(map(str, element))}"
    return f"a single {type(element).__name__}"


Precision = Literal["bf16", "fp16"] | None

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(x: Any, precision: Precision) -> AbstractContextManager[Any]:
    """Return `torch.autocast` for the device of `x`, or a null context without a precision."""
    if precision is None:
        return nullcontext()
    device = next((leaf.device.type for leaf in leaves_in(x) if isinstance(leaf, torch.Tensor)), "cpu")
    return torch.autocast(device, _TYPES[precision])


def forward(module: nn.Module, x: Any, precision: Precision) -> Any:
    """Return the module's output for `x`; with "bf16" and "fp16" under torch.autocast, 16-bit outputs cast to float32.

    Losses and metrics are then computed in float32, and outputs can become numpy arrays, which lack bfloat16.

    >>> forward(nn.Linear(2, 1), torch.ones(3, 2), "bf16").dtype
    torch.float32
    """
    with autocast(x, precision):
        outputs = apply_module(module, x)
    return outputs if precision is None else widened(outputs)


def widened(outputs: Any) -> Any:
    """Cast 16-bit tensors to float32."""
    if isinstance(outputs, list):  # which would be one leaf of a nest
        return list(map(widened, outputs))
    return map_structure(
        lambda leaf: leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype in _TYPES.values() else leaf, outputs
    )


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
        """Return row weights for class numbers (n,) or (n, 1), or scores (n, classes), of which the largest counts."""
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
