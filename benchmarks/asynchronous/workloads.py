"""What is measured, and who takes part."""

from __future__ import annotations

from benchmarks.asynchronous.sizes import SIZES, TWO_SERVERS
from benchmarks.steps.workloads import Line, Workload

TENSORFLOW, PLAIN_RAY = "TensorFlow", "plain Ray"
SCHEDULE, RUN = "raydist, schedule", "raydist, run"
SYNCHRONOUS, ASYNC = "synchronous", "async"
BACKUPS, BOUNDED = "SyncWithBackups(1)", "BoundedStaleness(4)"
_PACKAGE = "benchmarks.asynchronous.peers"
_TOLD = {
    "mlp16": "MLP of 13k parameters, 64 rows an update",
    "mlp1024": "MLP of 1.9M parameters, 128 rows an update",
    "embedding": "embedding 1M x 16, 4,096 random rows an update",
}


def _line(label: str, contender: str, run: str) -> Line:
    return Line(label, contender, run, package=_PACKAGE)


_STRAGGLERS = {
    SYNCHRONOUS: _line(SYNCHRONOUS, "raydist_stragglers", "synchronous"),
    ASYNC: _line(ASYNC, "raydist_stragglers", "async"),
    BACKUPS: _line(BACKUPS, "raydist_stragglers", "backups"),
    BOUNDED: _line(BOUNDED, "raydist_stragglers", "bounded"),
}


def _servers(name: str, servers: int) -> Workload:
    """The plain Ray server is one, and sends whole variables: a large table is not for it."""
    lines = [_line(SCHEDULE, "raydist_servers", "schedule"), _line(RUN, "raydist_servers", "run")]
    lines.append(_line(TENSORFLOW, "tf_servers", "schedule"))
    if servers == 1 and SIZES[name].width:
        lines.append(_line(PLAIN_RAY, "ray_server", "wait"))
    return Workload(
        name if servers == 1 else name + TWO_SERVERS,
        f"{_TOLD[name]}, 2 workers, {servers} server{'s' * (servers > 1)}",
        tuple(lines),
        tuple(line.label for line in lines[2:]),
        servers=servers,
        unit="updates",
    )


def _stragglers(name: str, description: str, *labels: str) -> Workload:
    lines = tuple(_STRAGGLERS[label] for label in (SYNCHRONOUS, *labels))
    return Workload(
        name, description, lines, (SYNCHRONOUS,), ranks=4, target_s=6.0, tells_cpu=False, servers=1, unit="batches"
    )


WORKLOADS = (
    *(_servers(name, servers) for servers in (1, 2) for name in SIZES),
    _stragglers("one_slow", "4 workers, compute simulated, one of them 5x slower", ASYNC, BACKUPS),
    _stragglers("at_times", "4 workers, compute simulated, each 5x slower in 10 % of its steps", ASYNC, BOUNDED),
)
STUDIES = ("huge_table", "mnist")
"""Of `benchmarks.asynchronous.studies`."""
