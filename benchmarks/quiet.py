"""What else a machine does: libraries that end processes after a pass, in others' time, and other virtual machines."""

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
_STOLEN_FIELD = 8


def read_stat() -> str:
    return _STAT.read_text()


def busy_s(stat: str) -> float:
    """Seconds that all cores together have worked, out of the text of /proc/stat (Linux).

    >>> busy_s("cpu  200 0 100 5000 50 0 0 0 0 0")
    3.0
    """
    fields = _ticks(stat)
    ticks = sum(field for number, field in enumerate(fields, 1) if number not in _IDLE_FIELDS)
    return ticks / os.sysconf("SC_CLK_TCK")


def stolen_share(before: str, after: str) -> float:
    """Of the time in which cores had work between two texts of /proc/stat, what the host gave to other machines.

    >>> stolen_share("cpu  200 0 100 5000 50 0 0 5 0 0", "cpu  260 0 110 5500 50 0 0 35 0 0")
    0.3
    """
    passed_s = busy_s(after) - busy_s(before)
    stolen = _ticks(after)[_STOLEN_FIELD - 1] - _ticks(before)[_STOLEN_FIELD - 1]
    return stolen / os.sysconf("SC_CLK_TCK") / passed_s if passed_s else 0.0


def _ticks(stat: str) -> list[int]:
    return [int(field) for field in stat.splitlines()[0].split()[1:]]


def await_quiet(
    limit_s: float = 10.0,
    *,
    read: Callable[[], str] = read_stat,
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
