"""What became of the saves that a process has a part in: written in threads, told to whoever asks."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import final

from raydist.checkpoints.sharing.shares import Share

__all__ = ["SaveReports"]

_KEPT = 4  # reports: of saves that nobody has asked about yet


@final
class SaveReports:
    """The saves of one process. Any thread may ask.

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
        """Have it done in a thread; what it returns or raises is the report of that save."""

        def write() -> None:
            try:
                self.tell(token, do())
            except Exception as error:
                self.tell(token, error)

        thread = threading.Thread(target=write, name="raydist-share", daemon=True)
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        thread.start()

    def tell(self, token: str, outcome: Share | Exception) -> None:
        """This became of a save."""
        with self._lock:
            self._told[token] = outcome
            while len(self._told) > _KEPT:
                self._told.popitem(last=False)

    def of(self, token: str) -> Share | Exception | None:
        """What became of a save; None where that is not known yet."""
        with self._lock:
            return self._told.get(token)

    def close(self, within_s: float) -> None:
        """Wait for what is being written."""
        end = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
