"""Elements of a training dataset: inputs, targets, weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from raydist.errors import SpecError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Example", "apply_module", "inputs_of", "unpack"]


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


def _describe(element: Any) -> str:
    if isinstance(element, tuple):
        return f"a tuple of {len(element)}"
    if isinstance(element, dict):
        return f"a dict with the keys {sorted(map(str, element))}"
    return f"a single {type(element).__name__}"
