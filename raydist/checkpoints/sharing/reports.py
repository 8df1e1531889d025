"""Outcomes of the saves that a process takes part in. Threads write; any thread may ask for the outcome."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import final

from raydist.checkpoints.sharing.shares import Share

__all__ = ["SaveReports"]

_KEPT = 4  # reports to keep for saves that have not been asked about yet


@final
class SaveReports:
    """The saves of one process. Thread-safe.

    >>> reports = SaveReports()
    >>> reports.write("a", lambda: Share({}))
    >>> reports.close(10.0)
    >>> reports.of("a"), reports.of("b")
    (Share(files={}, objects={}, random=(), copy_s=0.0, entries={}), None)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: OrderedDict[str, Share | Exception] = OrderedDict()
        self._threads: list[threading.Thread] = []

    def write(self, token: str, do: Callable[[], Share]) -> None:
        """Run `do` in a thread; its result or error becomes the outcome of the save."""

        def write() -> None:
            try:
                self.tell(token, do())
            except Exception as error:
                self.tell(token, error)

        thread = threading.Thread(target=write, name="raydist-share", daemon=True)
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        thread.start()

    def tell(self, token: str, outcome: Share | Exception) -> None:
        """Record the outcome of a save."""
        with self._lock:
            self._told[token] = outcome
            while len(self._told) > _KEPT:
                self._told.popitem(last=False)

    def of(self, token: str) -> Share | Exception | None:
        """Return the outcome of a save, or None while it is unknown."""
        with self._lock:
            return self._told.get(token)

    def close(self, within_s: float) -> None:
        """Block for up to `within_s` seconds until running writes have ended."""
        end = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
