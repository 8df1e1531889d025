"""Nests that are elements of datasets, or specs of elements. None is a part without leaves (tf.NoneTensorSpec)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raydist.core.nest import NOTHING, Structure, flatten, map_structure


def flatten_element(element: Any) -> tuple[list[Any], Structure]:
    """Return the leaves of an element or an element spec, and its structure.

    >>> leaves, structure = flatten_element((1, None))
    >>> leaves, str(structure)
    ([1], "('*', None)")
    """
    return flatten(element, none=NOTHING, classes=False)


def map_element(fn: Callable[..., Any], element: Any) -> Any:
    """Apply `fn` to every leaf of an element or an element spec.

    >>> map_element(abs, {"x": -1, "y": None})
    {'x': 1, 'y': None}
    """
    return map_structure(fn, element, none=NOTHING, classes=False)
