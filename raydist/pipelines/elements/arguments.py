"""Checks of the arguments that users give to operations."""

from __future__ import annotations

import operator
from typing import Any

from raydist.errors import InvalidArgumentError

__all__ = ["require_choice", "whole_number"]


def whole_number(name: str, value: Any) -> int:
    """`value` as an int: Python's, numpy's or torch's whole numbers; InvalidArgumentError for all else, True included.

    >>> whole_number("batch_size", 2.0)
    Traceback (most recent call last):
    raydist.errors.InvalidArgumentError: batch_size must be a whole number, got 2.0.
    """
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise InvalidArgumentError(f"{name} must be a whole number, got {value!r}.")


def require_choice(deterministic: Any) -> None:
    """TypeError unless `deterministic` is a bool, or None for whatever the options say."""
    if deterministic is not None and not isinstance(deterministic, bool):
        raise TypeError(f"deterministic must be a bool or None, got {deterministic!r}.")
