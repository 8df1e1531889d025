"""Threads that end before the interpreter does.

A thread that comes back from C++ while the interpreter ends aborts the process ("terminate called without an active
exception"): every function of torch's that lets other threads run is such a way back. CPython 3.14 lets them hang.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

__all__ = ["end_at_exit"]

_LIMIT_S = 15.0  # for all together; who is held up longer than that is left behind

_stops: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = weakref.WeakKeyDictionary()


def end_at_exit(thread: threading.Thread, stop: Callable[[], object]) -> None:
    """Have the process's end wait for a daemon thread, where it is still alive then: at most 15 s for all of them.

    To be called before the thread is started.

    Args:
        thread: May run functions of others.
        stop: Called first, to tell the thread to end. Must return at once.
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
