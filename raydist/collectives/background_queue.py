"""A daemon thread that runs functions one after the other, and ends when it has had none for a while."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import final

from raydist.ending_threads import end_at_exit

__all__ = ["BackgroundQueue"]

_IDLE_S = 1.0


@final
class BackgroundQueue:
    """Runs functions in the order in which they are submitted, in a daemon thread that lives while there are any.

    Args:
        name: Of the thread.
        stop: Called when the process ends, to end the function that runs. Must return at once.

    >>> background = BackgroundQueue("raydist-example", lambda: None)
    >>> background.submit(lambda: None).result()
    """

    def __init__(self, name: str, stop: Callable[[], object]) -> None:
        self._name = name
        self._stop = stop
        self._functions: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], None]) -> Future[None]:
        """Run a function when all submitted before have ended; the future has its error."""
        future: Future[None] = Future()
        with self._lock:
            self._functions.put((function, future))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                end_at_exit(self._thread, self._stop)
                self._thread.start()
        return future

    def _run(self) -> None:
        while (submitted := self._next()) is not None:
            function, future = submitted
            try:
                function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            del function, future, submitted

    def _next(self) -> tuple[Callable[[], None], Future[None]] | None:
        with contextlib.suppress(queue.Empty):
            return self._functions.get(timeout=_IDLE_S)
        with self._lock:
            if not self._functions.empty():
                return self._functions.get_nowait()
            self._thread = None
        return None
