"""Waiting until a machine has nothing left to do: some libraries end processes after a pass, in others' time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_STAT = Path("/proc/stat")
_LOOK_S = 0.2
_LOOKS = 6  # in a row that find it quiet: Ray ends a worker when it has been idle for a second
_BUSY = 0.2  # of one core: clusters that idle take half of that
_IDLE_FIELDS = (4, 5)  # idle, and waiting for a disk


def busy_s(stat: str) -> float:
    """Seconds that all cores together have worked, out of the text of /proc/stat (Linux).

    >>> busy_s("cpu  200 0 100 5000 50 0 0 0 0 0")
    3.0
    """
    fields = stat.splitlines()[0].split()
    ticks = sum(int(field) for number, field in enumerate(fields) if number and number not in _IDLE_FIELDS)
    return ticks / os.sysconf("SC_CLK_TCK")


def await_quiet(
    limit_s: float = 10.0,
    *,
    read: Callable[[], str] = _STAT.read_text,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait until the cores have had next to nothing to do for a while, at most `limit_s`; whether they have."""
    before, num_quiet = busy_s(read()), 0
    for _ in range(max(1, round(limit_s / _LOOK_S))):
        sleep(_LOOK_S)
        now = busy_s(read())
        num_quiet = num_quiet + 1 if now - before <= _BUSY * _LOOK_S else 0
        if num_quiet == _LOOKS:
            return True
        before = now
    return False
