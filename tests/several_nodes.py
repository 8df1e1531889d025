"""A Ray cluster of several nodes: raylets of this machine, and a process of its own that drives strategies on them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import raydist as rd
from tests.ray_head import ray_home

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

_T = TypeVar("_T")

# The first element waits for the input workers of both nodes to start, which takes a slow machine half a minute.
LIMITS = rd.Timeouts(start_s=60, collective_s=20, step_s=40, input_s=80)
LIMIT_S = 110.0  # for one thing that the driver process does
# So that Ray notices within 6 s that a node is lost (15 s by default), and takes none that is merely slow for lost.
NOTICE_SOON = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 4,
}
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Nodes:
    """The driver process. What it is to do must be a function of a module: it is named, not sent."""

    executor: ProcessPoolExecutor

    def run(self, fn: Callable[..., _T], *args: Any, **settings: Any) -> _T:
        """Call `fn(*args, **settings)` there; return its result or raise its error."""
        return self.executor.submit(fn, *args, **settings).result(LIMIT_S)

    def check(self, fn: Callable[..., Any], *args: Any, workers: int = 2, devices: int = 1) -> None:
        """`fn(strategy, *args)` there, with a strategy that later checks of this shape use too."""
        self.run(_check, fn, workers, devices, args)


@contextlib.contextmanager
def several_nodes(cpus: Sequence[int], **settings: Any) -> Iterator[Nodes]:
    """A head without CPUs, which the driver is on, and a node for each of `cpus`."""
    context = multiprocessing.get_context("spawn")
    with ray_home() as home, ProcessPoolExecutor(1, mp_context=context) as executor:
        nodes = Nodes(executor)
        nodes.run(_start, dict(home.environment), tuple(cpus), settings)
        try:
            yield nodes
        finally:
            nodes.run(_stop)


@functools.cache
def cluster() -> Cluster:
    """In the driver process: its cluster."""
    from ray.cluster_utils import Cluster

    return Cluster()


@functools.cache
def shared_strategy(workers: int, devices: int) -> rd.MultiWorkerMirroredStrategy:
    """In the driver process: a strategy that checks share."""
    return rd.MultiWorkerMirroredStrategy(workers, devices, timeouts=LIMITS, resources_per_replica={"CPU": 0.01})


def _check(fn: Callable[..., None], workers: int, devices: int, args: tuple[Any, ...]) -> None:
    fn(shared_strategy(workers, devices), *args)


def _start(environment: Mapping[str, str], cpus: Sequence[int], settings: Mapping[str, Any]) -> None:
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]
    os.environ.update(environment)
    # Workers of a node that is killed have no parent then: they become this process's, which ends them.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    import ray

    # Nobody reads logs: a monitor of them would be one more process for each node.
    cluster().add_node(
        num_cpus=0, include_dashboard=False, include_log_monitor=False, _system_config={**NOTICE_SOON, **settings}
    )
    for count in cpus:
        cluster().add_node(num_cpus=count, include_log_monitor=False)
    ray.init(cluster().address, logging_level=logging.ERROR, log_to_driver=False)


def _stop() -> None:
    import ray

    ray.shutdown()
    cluster().shutdown()
    while left := descendants(os.getpid()):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def descendants(pid: int) -> list[int]:
    """Processes that a process started, and those that these did."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for ancestor in found:
        found += [child for child, parent in parents.items() if parent == ancestor]
    return found[1:]
