"""Rest for an actor's main thread while another thread runs steps: Ray wakes it a hundred times a second for nothing.

It looks for signals (`CoreWorker::RunTaskExecutionLoop`), which takes 45 us with cold caches: where sixty-four
processes have two cores, a fifth of these. Python handles signals in the main thread: one can have it wait there.

What a resting actor is asked for beside its steps is answered when the rest is over, so this is for crowds only.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from raydist.crowds import is_crowd

__all__ = ["MainThreadRest"]

# How long a call beside the steps may wait, such as one that gives them up. Half a second took 9 wake-ups a second: with
# 64 replicas on two cores, 2 % of these.
_REST_S = 1.5
_PERIOD_S = _REST_S + 0.03  # a rest begins within 10 ms of its signal, and a signal that comes in one is lost
_FIRST_S = 0.05  # after the beginning of what lasts longer than that
_SIGNAL = signal.SIGURG  # nobody sends it to processes like these, and one without a handler ignores it


@final
class MainThreadRest:
    """Lets the main thread rest, from time to time, inside of `while_busy`. Made in the main thread.

    Args:
        num_neighbours: How many processes like this one are on the machine: where they are few, nobody rests.
    """

    def __init__(self, num_neighbours: int) -> None:
        self._lock = threading.Lock()
        self._busy = False
        self._sender: threading.Thread | None = None
        self._over = threading.Event()
        self._resting = False
        self._rests = is_crowd(num_neighbours) and threading.current_thread() is threading.main_thread()
        if self._rests:
            signal.signal(_SIGNAL, self._rest)

    @contextmanager
    def while_busy(self) -> Iterator[None]:
        """Around what another thread does. Its end ends a rest."""
        if not self._rests:
            yield
            return
        self._begin()
        try:
            yield
        finally:
            self._busy = False
            self._over.set()

    def _begin(self) -> None:
        with self._lock:
            self._busy = True
            self._over.clear()
            if self._sender is None:
                self._sender = threading.Thread(target=self._send_signals, name="raydist-rest", daemon=True)
                self._sender.start()

    def _send_signals(self) -> None:
        """Not the handler itself: its own signal would begin another rest inside of the one that ends."""
        main = threading.main_thread().ident or 0
        time.sleep(_FIRST_S)
        while True:
            with self._lock:
                if not self._busy:
                    self._sender = None
                    return
            signal.pthread_kill(main, _SIGNAL)
            time.sleep(_PERIOD_S)

    def _rest(self, *_: object) -> None:
        if self._resting:
            return
        self._resting = True
        try:
            self._over.wait(_REST_S)
        finally:
            self._resting = False
