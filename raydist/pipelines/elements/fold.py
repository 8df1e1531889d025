"""Folds: a value that a function updates from element to element, for `scan` and `reduce`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, final

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.pipelines.elements.element_nests import flatten_element, map_element
from raydist.pipelines.elements.functions import function_label
from raydist.pipelines.elements.leaf_values import as_leaf
from raydist.pipelines.elements.spec import spec_of_value
from raydist.pipelines.elements.tensor_functions import note_numpy_in_torch, receiving_tensors


@final
class FoldState:
    """A nest of leaves that keeps its structure and dtypes; shapes may change.

    Attributes:
        value: The nest, of numpy arrays and scalars, bytes and str.
    """

    def __init__(self, initial: Any) -> None:
        self.value = copy.deepcopy(map_element(as_leaf, initial))

    def replace(self, value: Any, label: str) -> None:
        """Set the value.

        Raises:
            SpecError: The structure or a dtype differs.
        """
        fresh = map_element(as_leaf, value)
        if _kind(fresh) != _kind(self.value):
            raise SpecError(
                f"The state of {label} must keep its structure and dtypes, {_specs(self.value)}, got {_specs(fresh)}. "
                "Convert the new state, or give an initial state of that type."
            )
        self.value = fresh


def _specs(nest: Any) -> Any:
    return map_element(spec_of_value, nest)


def _kind(nest: Any) -> Any:
    leaves, structure = flatten_element(nest)
    return structure, [spec_of_value(leaf).dtype for leaf in leaves]


def fold(fn: Callable[..., Any], initial: Any, elements: Iterable[Any], label: str) -> Any:
    """Apply `state = fn(state, element)` to one element after the other, from `initial` on; return the last state.

    >>> int(fold(lambda total, x: total + x, 0, [1, 2, 3], "reduce"))
    6
    """
    if not callable(fn):
        raise InvalidArgumentError(f"{label} needs a function, got {fn!r:.100}.")
    fold, call, full = FoldState(initial), receiving_tensors(fn), f"{label} ({function_label(fn)})"
    for element in elements:
        try:
            result = call(fold.value, element)
        except Exception as error:
            note_numpy_in_torch(error)
            raise
        fold.replace(result, full)
    return fold.value
