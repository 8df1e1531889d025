"""Closing what a strategy started that was dropped without `close`: on a thread of its own."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import final

__all__ = ["WhenDropped"]


@final
class WhenDropped:
    """What is closed once an object is gone that nobody closed; the newest first.

    A finalizer runs on whatever thread collects the garbage, the thread of Ray that brings all of Ray's answers among
    them. What waits there for an answer, as giving back a placement group does, waits for ever, and all else that the
    process asks of Ray with it. So a thread of its own closes.

    Args:
        owner: The object. What is to be closed must not hold it.
    """

    def __init__(self, owner: object) -> None:
        self._closers: list[Callable[[], None]] = []
        self._finalizer = weakref.finalize(owner, _close_elsewhere, self._closers)

    def add(self, close: Callable[[], None]) -> None:
        """Something more is to be closed."""
        self._closers.append(close)

    def forget(self) -> None:
        """All of it is closed."""
        self._finalizer.detach()


def _close_elsewhere(closers: list[Callable[[], None]]) -> None:
    if not closers:
        return
    if not threading.main_thread().is_alive():  # the program ends: no thread may begin any more
        _close(closers)
    else:
        threading.Thread(target=_close, args=(closers,), name="raydist-closes-dropped", daemon=False).start()


def _close(closers: list[Callable[[], None]]) -> None:
    with contextlib.ExitStack() as stack:
        for close in closers:
            stack.callback(close)
