"""Remembering what is true of a class, without keeping the class."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["remembered_by_class"]

_T = TypeVar("_T")


def remembered_by_class(fn: Callable[[Any], _T]) -> Callable[[Any], _T]:
    """As `functools.cache` for a function of a class. A class that nobody uses is forgotten.

    Mirrored objects have classes of their own, which hold their strategy: a cache must not hold them.

    >>> @remembered_by_class
    ... def name_of(cls):
    ...     return cls.__name__
    >>> name_of(int), name_of(int)
    ('int', 'int')
    """
    known: dict[int, tuple[weakref.ref[Any], _T]] = {}

    def remembered(cls: Any) -> _T:
        found = known.get(id(cls))
        if found is None:
            key = id(cls)
            found = known[key] = weakref.ref(cls, lambda _: _drop(known, key)), fn(cls)
        return found[1]

    return remembered


def _drop(known: dict[int, Any], key: int) -> None:
    known.pop(key, None)
