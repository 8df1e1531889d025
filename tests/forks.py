"""Calling something in a forked child."""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Callable

LIMIT_S = 20


def in_a_forked_child(fn: Callable[[], object]) -> int:
    """The status with which a child ends that calls `fn`: 0, 1 if that raises, -SIGALRM if it does not return."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns where there are threads
        pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
        try:
            fn()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
