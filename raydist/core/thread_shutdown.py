"""Threads that are stopped and joined before the interpreter ends.

A thread that returns from C++ while the interpreter ends aborts the process ("terminate called without an active
exception"); torch functions that release the GIL are such returns. CPython 3.14 lets these threads hang instead.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

_LIMIT_S = 15.0  # for all threads together; slower threads are not waited for

_stops: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = weakref.WeakKeyDictionary()


def end_at_exit(thread: threading.Thread, stop: Callable[[], object]) -> None:
    """Join a daemon thread at the end of the process, if it is alive then: at most 15 s for all threads together.

    Call this before the thread is started.

    Args:
        thread: A thread that may run user functions or C++ code.
        stop: Called first, to tell the thread to end. It must not block.
    """
    _stops[thread] = stop


@atexit.register
def _end_all() -> None:
    known = [(thread, _stops.get(thread)) for ref in _stops.keyrefs() if (thread := ref()) and thread.is_alive()]
    for _, stop in known:
        if stop is not None:
            stop()
    deadline = time.monotonic() + _LIMIT_S
    for thread, _ in known:
        thread.join(max(deadline - time.monotonic(), 0.0))
