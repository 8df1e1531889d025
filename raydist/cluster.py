"""The Ray cluster under a strategy: start one, or join the one that runs.

With `actors/` and `collectives/ray_backend.py` this is the only module that imports ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from raydist.errors import DeadlineExceededError, UnavailableError
from raydist.job_environment import script_folder_for_workers
from raydist.lasting_thread import run_where_it_lasts

__all__ = ["Cluster", "Node", "connect", "place", "release"]

_STARTED_HERE = "raydist_local"  # a custom resource marks a Ray of ours: the mark lives exactly as long as the cluster
_SHARED_CPU = 0.001  # on a Ray of ours replicas and input workers share the cores, so that any count fits
# Ray collects what is to be freed for a second: by then an input pipeline has written 300 MB into pages that nobody had
# used before, at twice the price of those just read (0.55 against 0.28 ms of CPU for a batch of 400 KB).
_FREE_AT_ONCE = {"free_objects_period_milliseconds": 0}
_LOOK_S = 0.5  # between two looks whether Ray is shut down, where a thread waits for that
_NEEDED = {"gcs_server", "raylet"}  # of the processes of a Ray: what it does not live without
_CONNECT_S = 10.0  # for one TCP connection to a cluster's address

_log = logging.getLogger("raydist")


@final
@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the cluster: its resources in all."""

    node_id: str
    address: str
    resources: Mapping[str, float]

    @property
    def num_cpus(self) -> int:
        return int(self.resources.get("CPU", 0))

    @property
    def num_gpus(self) -> int:
        return int(self.resources.get("GPU", 0))


@final
@dataclass(frozen=True, slots=True)
class Cluster:
    """The cluster that this process is connected to.

    Attributes:
        started_here: raydist started it: it lives until this process ends, and its cores are shared freely.
        nodes: Living nodes, this process's own first.
    """

    started_here: bool
    nodes: tuple[Node, ...]

    def best_node(self) -> Node:
        """The node with most GPUs, else this process's own if it has CPUs, else the one with most CPUs."""
        gpu_node = max(self.nodes, key=lambda node: node.num_gpus)
        if gpu_node.num_gpus:
            return gpu_node
        return self.nodes[0] if self.nodes[0].num_cpus else max(self.nodes, key=lambda node: node.num_cpus)

    def cpu_replica_resources(self) -> dict[str, float]:
        """What one CPU replica asks for."""
        return {"CPU": _SHARED_CPU if self.started_here else 1.0}


def connect() -> Cluster:
    """Join the cluster this process belongs to or that RAY_ADDRESS names; start one on this machine if there is none.

    Blocks until Ray is up (its own limits apply). A Ray started here is kept for the next strategy.
    """
    if not ray.is_initialized():
        _initialize()
    _require_living()
    nodes = _alive_nodes()
    return Cluster(_STARTED_HERE in nodes[0].resources, nodes)


def _initialize() -> None:
    address = os.environ.get("RAY_ADDRESS")
    if address:  # set by `ray job submit` or by the user
        _join(address)
    else:
        run_where_it_lasts(_start, _await_end, name="raydist-keeps-ray")


def _start() -> None:
    ray.init(
        "local",  # never joins a stray cluster of this host
        include_dashboard=False,
        logging_level=logging.WARNING,
        resources={_STARTED_HERE: 1},
        _system_config=_FREE_AT_ONCE,
    )


def _await_end() -> None:
    """Return once the Ray that was started here is shut down."""
    node = ray._private.worker._global_node
    while ray._private.worker._global_node is node:
        time.sleep(_LOOK_S)


def _require_living() -> None:
    """Fail at once where the Ray of this process has died: Ray itself waits for a minute, and ends the process then."""
    node = ray._private.worker._global_node
    ended: set[str] = set() if node is None else {name for name, _ in node.dead_processes()}
    dead = sorted(ended & _NEEDED)
    if dead:
        raise UnavailableError(
            f"The Ray that this process has started must be running, but its {' and '.join(dead)} ended: killed, or "
            "started by ray.init() in a thread that has ended since (Ray dies with that thread). Call ray.shutdown() "
            "and go on, and start Ray from the main thread or leave starting it to raydist."
        )


def _join(address: str) -> None:
    variables = script_folder_for_workers(os.environ, sys.argv[0], sys.path)
    try:
        _require_listener(address)
        ray.init(logging_level=logging.WARNING, runtime_env={"env_vars": variables} if variables else None)
    except OSError as error:
        raise UnavailableError(
            f"RAY_ADDRESS={address!r} names a Ray cluster that does not answer: {error} "
            "Start it (ray start --head), or unset RAY_ADDRESS to let raydist start Ray on this machine."
        ) from error


def _require_listener(address: str) -> None:
    """Fail at once where nobody listens: ray.init asks a dead address for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():  # "auto" and "local" name no port
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()


def _alive_nodes() -> tuple[Node, ...]:
    nodes = [
        Node(info["NodeID"], info["NodeManagerAddress"], dict(info["Resources"]))
        for info in ray.nodes()
        if info["Alive"]
    ]
    here = ray.get_runtime_context().get_node_id()
    return tuple(sorted(nodes, key=lambda node: (node.node_id != here, node.node_id)))


def place(bundles: Sequence[Mapping[str, float]], *, strategy: str, timeout_s: float) -> PlacementGroup:
    """Reserve one bundle per replica; wait until all are there.

    An autoscaling cluster may still grow, so a request that does not fit now waits too, but never beyond `timeout_s`.

    Raises:
        DeadlineExceededError: Not placed in time; says what was asked for and what each node has.
    """
    group: PlacementGroup = placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
    if group.wait(timeout_s):
        return group
    remove_placement_group(group)
    raise DeadlineExceededError(
        f"The cluster could not place {len(bundles)} replicas within {timeout_s:g} s. Asked: {_describe(bundles)}"
        f"{' on one node' if strategy == 'STRICT_PACK' else ''}. There is: {_describe_nodes()}. Use fewer replicas, "
        "give each less (resources_per_replica), add nodes, or raise Timeouts.start_s where the cluster grows itself."
    )


def release(group: PlacementGroup) -> None:
    """Give the reservation back; every actor still in it is killed."""
    if ray.is_initialized():
        with contextlib.suppress(Exception):  # of another Ray, by now: it went with that
            remove_placement_group(group)


def _describe(bundles: Sequence[Mapping[str, float]]) -> str:
    kinds = {tuple(sorted(bundle.items())) for bundle in bundles}
    return ", ".join(
        f"{sum(tuple(sorted(b.items())) == kind for b in bundles)} x {dict(kind)}" for kind in sorted(kinds)
    )


def _describe_nodes() -> str:
    free = ray._private.state.available_resources_per_node()
    return "; ".join(
        f"node {node.address}: " + ", ".join(_describe_resource(node, free, name) for name in ("CPU", "GPU"))
        for node in _alive_nodes()
    )


def _describe_resource(node: Node, free: Mapping[str, Mapping[str, float]], name: str) -> str:
    have = node.resources.get(name, 0)
    return f"{have:g} {name} ({free.get(node.node_id, {}).get(name, 0):g} free)"
