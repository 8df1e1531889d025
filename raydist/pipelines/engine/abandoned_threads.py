"""Threads that do not end. Python cannot stop a thread that a user's function blocks, so close() leaves it behind."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence

__all__ = ["CLOSE_S", "join_threads"]

CLOSE_S = 4.0
"""Seconds that closing waits for running functions. All threads of one executor share this limit."""


def join_threads(threads: Sequence[threading.Thread], work_of: Callable[[str], str], limit_s: float = CLOSE_S) -> bool:
    """Wait until all `threads` have ended, up to `limit_s` seconds; warn about each that has not.

    Args:
        threads: Daemon threads that must end.
        work_of: Returns the work of the thread with this name, for the warning.
        limit_s: Seconds for all threads together.

    Returns:
        True if all threads have ended.
    """
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    stuck = [thread.name for thread in threads if thread.is_alive()]
    for name in stuck:
        warnings.warn(
            f"Thread {name} must end within {limit_s:g} s of close(), and is still busy with {work_of(name)}. It was "
            "left behind, and ends when the function returns. Only functions on input workers "
            "(Options.num_input_workers) can be stopped.",
            RuntimeWarning,
            stacklevel=2,
        )
    return not stuck
