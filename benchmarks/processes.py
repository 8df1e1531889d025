"""The processes of one contender, from /proc (Linux): what they cost, and how the others rest meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """A line of the process table.

    Attributes:
        pid: Its number.
        parent: The parent's.
        session: The number of the session.
        command: The command line.
        cpu_ms: CPU time so far, of the system for it included.
    """

    pid: int
    parent: int
    session: int
    command: str
    cpu_ms: float


def read_processes() -> list[Process]:
    """All processes of this machine."""
    found = []
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has ended meanwhile
                found.append(_read(folder))
    return found


def _read(folder: Path) -> Process:
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return Process(
        int(folder.name),
        int(fields[1]),
        int(fields[3]),
        command.strip(),
        _TICK_MS * (int(fields[11]) + int(fields[12])),
    )


def started_by(root: int, processes: Iterable[Process]) -> list[Process]:
    """The process `root` and all that it started: its session, its descendants, and their sessions."""
    listed, known, sessions = list(processes), {root}, {root}
    while True:
        found = [process for process in listed if {process.pid, process.parent} & known or process.session in sessions]
        if len(found) == len(known):
            return found
        known = {process.pid for process in found}
        sessions = {process.session for process in found if process.session == process.pid or process.session in known}


def pause(root: int) -> None:
    """Let the process `root` and all that it started take no CPU time until `resume`."""
    _signal_all(root, signal.SIGSTOP)


def resume(root: int) -> None:
    """Let them go on. Does nothing to those that never paused."""
    _signal_all(root, signal.SIGCONT)


def _signal_all(root: int, number: signal.Signals) -> None:
    for process in started_by(root, read_processes()):
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
