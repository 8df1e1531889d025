"""Allocation of large columns in memory chosen by the caller of a stage, such as shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from raydist.pipelines.elements.blocks import Column

__all__ = ["MakeColumn", "columns_made_by", "new_column"]

MakeColumn = Callable[[tuple[int, ...], np.dtype[Any]], Column | None]
"""Function that returns an uninitialised C-contiguous array (numbers only); None if there is no room."""

_maker: ContextVar[MakeColumn | None] = ContextVar("raydist_column_maker", default=None)


@contextmanager
def columns_made_by(make: MakeColumn | None) -> Iterator[None]:
    """Let :func:`new_column` call `make` on this thread inside the `with` block; None for memory of numpy.

    >>> room = np.zeros(8, np.int64)
    >>> with columns_made_by(lambda shape, dtype: np.ndarray(shape, dtype, room.data)):
    ...     new_column((2, 3), np.dtype(np.int64))[:] = 7
    >>> room.tolist()
    [7, 7, 7, 7, 7, 7, 0, 0]
    """
    token = _maker.set(make)
    try:
        yield
    finally:
        _maker.reset(token)


def new_column(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Column:
    """Return an uninitialised C-contiguous column."""
    make = _maker.get()
    made = None if make is None else make(shape, dtype)
    return np.empty(shape, dtype) if made is None else made
