"""CPU time of a contender by kind of process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from benchmarks.processes import Process, started_by

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
