"""CPU time of a contender by kind of process, from /proc (Linux)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

DRIVER, INPUT, REPLICAS, RAYLET, GCS, OTHER, SERVERS = KINDS = (
    *("driver", "input", "replicas", "raylet", "gcs", "other"),
    "servers",
)

_MARKS = (
    ("torch.distributed.run", OTHER),  # it names the module of its ranks
    ("ray::InputPipeline", INPUT),
    ("ray::InputWorker", INPUT),
    ("ray::ReplicaHost", REPLICAS),
    ("ray::RayTrainWorker", REPLICAS),
    ("ray::Member", REPLICAS),
    ("benchmarks.steps.peers.rank_", REPLICAS),
    ("ray::ParameterServer", SERVERS),
    ("ray::ServerHost", SERVERS),
    ("ray::DataWorker", REPLICAS),
    ("peers.rank_tf_chief", DRIVER),
    ("peers.rank_tf_server worker", REPLICAS),
    ("peers.rank_tf_server ps", SERVERS),
    ("raylet/raylet", RAYLET),
    ("gcs/gcs_server", GCS),
)
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


def kind_of(process: Process, root: int) -> str:
    """Which of `KINDS` a process of the contender `root` is."""
    if process.pid == root:
        return DRIVER
    return next((kind for mark, kind in _MARKS if mark in process.command), OTHER)


def by_kind(root: int, processes: Iterable[Process]) -> dict[str, float]:
    """CPU milliseconds so far of all that `root` started, by kind."""
    sums = dict.fromkeys(KINDS, 0.0)
    for process in started_by(root, processes):
        sums[kind_of(process, root)] += process.cpu_ms
    return sums


def between(before: Mapping[str, float], after: Mapping[str, float], repetitions: int) -> dict[str, float]:
    """CPU milliseconds of one repetition. Processes that ended in between count as nothing."""
    return {kind: max(0.0, after[kind] - before[kind]) / repetitions for kind in KINDS}
