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

# How long a call beside the steps may wait, such as one to save or to give them up. With half a second the main thread
# woke 9 times a second: of 64 replicas on two cores that was 2 % of these.
_REST_S = 1.0
_MARGIN_S = 0.03  # a rest begins within 10 ms of its signal, and a signal that comes in one is lost
_AWAKE_S = 0.05  # before the first rest, and after the end of work: who has an answer may ask for more
_SIGNAL = signal.SIGURG  # nobody sends it to processes like these, and one without a handler ignores it


@final
class MainThreadRest:
    """Lets the main thread rest, from time to time, inside of `while_busy`. Made in the main thread.

    Args:
        num_neighbours: How many processes like this one are on the machine: where they are few, nobody rests.
    """

    def __init__(self, num_neighbours: int) -> None:
        self._lock = threading.Lock()
        self._num_busy = 0
        self._sender: threading.Thread | None = None
        self._over = threading.Event()
        self._resting = False
        self._rests = is_crowd(num_neighbours) and threading.current_thread() is threading.main_thread()
        if self._rests:
            signal.signal(_SIGNAL, self._rest)

    @contextmanager
    def while_busy(self) -> Iterator[None]:
        """Around what another thread does; several may. Whichever ends first ends a rest."""
        if not self._rests:
            yield
            return
        self._begin()
        try:
            yield
        finally:
            with self._lock:
                self._num_busy -= 1
                self._over.set()

    def _begin(self) -> None:
        with self._lock:
            self._num_busy += 1
            if self._sender is None:
                self._sender = threading.Thread(target=self._send_signals, name="raydist-rest", daemon=True)
                self._sender.start()

    def _send_signals(self) -> None:
        """Not the handler itself: its own signal would begin another rest inside of the one that ends."""
        main = threading.main_thread().ident or 0
        while True:
            time.sleep(_AWAKE_S)
            with self._lock:
                if not self._num_busy:
                    self._sender = None
                    return
                self._over.clear()
            while not self._over.is_set():
                signal.pthread_kill(main, _SIGNAL)
                self._over.wait(_REST_S + _MARGIN_S)

    def _rest(self, *_: object) -> None:
        if self._resting:
            return
        self._resting = True
        try:
            self._over.wait(_REST_S)
        finally:
            self._resting = False
