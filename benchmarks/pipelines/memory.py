"""Peak memory of this process (Linux)."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

_SELF = Path("/proc/self")


def resident_kb(name: str) -> int:
    """A line of /proc/self/status in KB: VmRSS is the memory now, VmHWM its peak."""
    (line,) = [line for line in (_SELF / "status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1])


def peak_over_idle(read: Callable[[], object]) -> float:
    """MB by which the resident memory rose, at most, while `read` ran."""
    gc.collect()
    (_SELF / "clear_refs").write_text("5")  # forget the peak so far
    idle = resident_kb("VmRSS")
    read()
    return (resident_kb("VmHWM") - idle) / 1000
