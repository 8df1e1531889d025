"""A cache of function results per class that does not keep the class alive."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


def remembered_by_class(fn: Callable[[Any], _T]) -> Callable[[Any], _T]:
    """Cache a function of a class, as `functools.cache` does, without keeping the class alive.

    Mirrored objects have classes of their own that refer to their strategy: a cache must not hold them.

    >>> @remembered_by_class
    ... def name_of(cls):
    ...     return cls.__name__
    >>> name_of(int), name_of(int)
    ('int', 'int')
    """
    known: dict[int, _T] = {}
    living: dict[int, weakref.ref[Any]] = {}

    def remembered(cls: Any) -> _T:
        try:
            return known[id(cls)]
        except KeyError:
            living[id(cls)] = weakref.ref(cls, functools.partial(_forget, id(cls), known, living))
            return known.setdefault(id(cls), fn(cls))

    return remembered


def _forget(key: int, known: dict[int, Any], living: dict[int, Any], _: object) -> None:
    known.pop(key, None)
    living.pop(key, None)
