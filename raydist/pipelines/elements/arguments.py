"""Checks of the arguments of operations."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from raydist.core.errors import InvalidArgumentError
from raydist.core.nest import Structure


def whole_number(name: str, value: Any) -> int:
    """Return a whole number of Python, numpy or torch as an int; InvalidArgumentError for all else, also for bools.

    >>> whole_number("batch_size", 2.0)
    Traceback (most recent call last):
    raydist.core.errors.InvalidArgumentError: batch_size must be a whole number, got 2.0.
    """
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise InvalidArgumentError(f"{name} must be a whole number, got {value!r}.")


def require_choice(deterministic: Any) -> None:
    """Raise TypeError unless `deterministic` is a bool, or None for the choice of the options."""
    if deterministic is not None and not isinstance(deterministic, bool):
        raise TypeError(f"deterministic must be a bool or None, got {deterministic!r}.")


def parts_like(structure: Structure, nest: Any, name: str) -> list[Any]:
    """Return the part of `nest` for each leaf of `structure`. A part may be a tuple, such as a shape.

    If `nest` is None, every part is None.

    Raises:
        InvalidArgumentError: `nest`, the argument `name`, lacks the part of a leaf.
    """
    if nest is None:
        return [None] * structure.num_leaves
    return list(_walk(structure, nest, name))


def _walk(structure: Structure, nest: Any, name: str) -> Iterator[Any]:
    if structure.kind is None:
        yield nest
        return
    for key, child in zip(structure.keys, structure.children, strict=True):
        try:
            part = nest[key] if structure.kind in (tuple, dict) else getattr(nest, key)
        except (TypeError, KeyError, IndexError, AttributeError):
            raise InvalidArgumentError(
                f"{name} must be a nest like the element, {structure}, got {nest!r:.100} where {key!r} is needed."
            ) from None
        yield from _walk(child, part, name)
