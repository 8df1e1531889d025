"""A context manager that sets a context variable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

_T = TypeVar("_T")


@contextmanager
def contextvar_scope(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """Set a context variable within the block.

    >>> color = ContextVar("color", default="white")
    >>> with contextvar_scope(color, "red"):
    ...     color.get()
    'red'
    >>> color.get()
    'white'
    """
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
