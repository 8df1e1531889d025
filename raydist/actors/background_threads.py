"""Ray's own threads in a replica's process behind the one that runs steps, where many replicas share few cores.

Sixty-four processes on two cores have Ray's pollers and timers take an eighth of these. Whatever of that falls between
the end of a collective and the next step, all ranks wait for; most of a step they could run without being in the way.
Not where steps come by Ray: then the driver waits for these threads.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["put_behind"]

_NICER_BY = 10
_THREADS = Path("/proc/self/task")


def put_behind() -> int:
    """Let all threads that are not called as the process's first one run behind it; returns how many there are.

    Those that they start later are behind, too. Python's own threads have the name of the first one.
    """
    try:
        names = {int(entry.name): _name_of(entry) for entry in _THREADS.iterdir()}
    except OSError:  # no such files: another kernel
        return 0
    first = names.get(os.getpid())
    niceness = os.getpriority(os.PRIO_PROCESS, 0) + _NICER_BY  # the kernel cuts it off at 19
    behind = [thread for thread, name in names.items() if name not in ("", first)]
    for thread in behind:
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
    return len(behind)


def _name_of(entry: Path) -> str:
    try:
        return (entry / "comm").read_text()
    except OSError:
        return ""
