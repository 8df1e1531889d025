"""The Ray cluster under a strategy: start one, or join the one that runs.

With `placement`, `actors/` and `collectives/ray_backend.py` this is the only module that imports ray.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import ipaddress
import logging
import os
import socket
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from raydist.compat.ray_internals import free_resources, init_local, own_node
from raydist.draining import draining_nodes
from raydist.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from raydist.feasibility import why_never
from raydist.job_environment import script_folder_for_workers
from raydist.lasting_thread import run_where_it_lasts
from raydist.placement import Request, await_placed, describe_amounts

__all__ = [
    "Cluster",
    "Node",
    "address_for",
    "address_of",
    "connect",
    "connected",
    "ensure_ray",
    "hosts_of",
    "living_nodes",
    "place",
    "release",
    "title_of_this_node",
    "waits_for_own",
    "without_drained",
]

_STARTED_HERE = "raydist_local"  # a custom resource marks a Ray of ours: the mark lives exactly as long as the cluster
_SHARED_CPU = 0.001  # on a Ray of ours replicas and input workers share the cores, so that any count fits
# Ray collects what is to be freed for a second: by then an input pipeline has written 300 MB into pages that nobody had
# used before, at twice the price of those just read (0.55 against 0.28 ms of CPU for a batch of 400 KB).
_FREE_AT_ONCE = {"free_objects_period_milliseconds": 0}
_LOOK_S = 0.5  # between two looks whether Ray is shut down, where a thread waits for that
_NEEDED = {"gcs_server", "raylet"}  # of the processes of a Ray: what it does not live without
_LOOPBACK = "127.0.0.1"
_CONNECT_S = 10.0  # for one TCP connection to a cluster's address

_AT_ONCE_S = 0.2  # what has room is placed by then

_log = logging.getLogger("raydist")


@final
@dataclass(frozen=True, slots=True)
class _Held:
    """A reservation of this process: for whom, and what it takes of which node."""

    holder: str
    taken: tuple[tuple[str, Mapping[str, float]], ...]


_held: dict[str, _Held] = {}
"""The reservations of this process that were not given back, by the id of their placement group."""


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

    @property
    def title(self) -> str:
        """Its name in messages: several nodes may have one address."""
        return f"node {self.address} ({self.node_id[:8]})"


@final
@dataclass(frozen=True, slots=True)
class Cluster:
    """The cluster that this process is connected to.

    Attributes:
        started_here: raydist started it: it lives until this process ends, and its cores are shared freely.
        nodes: Living nodes, this process's own first; those that are drained are left out.
    """

    started_here: bool
    nodes: tuple[Node, ...]

    def best_node(self) -> Node:
        """The node with most GPUs, else this process's own if it has CPUs, else the one with most CPUs."""
        gpu_node = max(self.nodes, key=lambda node: node.num_gpus)
        if gpu_node.num_gpus:
            return gpu_node
        return self.nodes[0] if self.nodes[0].num_cpus else max(self.nodes, key=lambda node: node.num_cpus)

    def replica_resources(self, kind: str) -> dict[str, float]:
        """What one replica on a "GPU" or a "CPU" asks for, where the user has not said."""
        return {"GPU": 1.0} if kind == "GPU" else self.cpu_replica_resources()

    def cpu_replica_resources(self) -> dict[str, float]:
        """What one CPU replica asks for."""
        return {"CPU": _SHARED_CPU if self.started_here else 1.0}

    def store_host(self) -> str:
        """The address of this machine for all others of the cluster; loopback where there is no other."""
        return "127.0.0.1" if len(self.nodes) == 1 else self.nodes[0].address


def connect() -> Cluster:
    """Join the cluster this process belongs to or that RAY_ADDRESS names; start one on this machine if there is none.

    Blocks until Ray is up (its own limits apply). A Ray started here is kept for the next strategy.
    """
    ensure_ray()
    nodes = living_nodes()
    return Cluster(_STARTED_HERE in nodes[0].resources, without_drained(nodes, draining_nodes()))


def ensure_ray() -> None:
    """:func:`connect`, for who asks nothing of the cluster: 1 ms less."""
    if not ray.is_initialized():
        _initialize()
    _require_living()


def connected() -> Cluster | None:
    """The cluster that this process is connected to already, if it is; nothing is started."""
    return connect() if ray.is_initialized() else None


def _initialize() -> None:
    address = os.environ.get("RAY_ADDRESS")
    with _keeping_breakpoints():
        if address:  # set by `ray job submit` or by the user
            _join(address)
        else:
            run_where_it_lasts(_start, _await_end, name="raydist-keeps-ray")


@contextlib.contextmanager
def _keeping_breakpoints() -> Iterator[None]:
    """Let `breakpoint()` stay pdb in this process, where Ray would have it ask for a package that is not there."""
    before = os.environ.get("PYTHONBREAKPOINT")
    yield
    if os.environ.get("RAY_DEBUG") != "legacy" and importlib.util.find_spec("debugpy") is None:
        os.environ.pop("PYTHONBREAKPOINT", None)
        os.environ.update({} if before is None else {"PYTHONBREAKPOINT": before})


def _start() -> None:
    init_local(_FREE_AT_ONCE, include_dashboard=False, logging_level=logging.WARNING, resources={_STARTED_HERE: 1})


def _await_end() -> None:
    """Return once the Ray that was started here is shut down."""
    node = own_node()
    while own_node() is node:
        time.sleep(_LOOK_S)


def _require_living() -> None:
    """Fail at once where the Ray of this process has died: Ray itself waits for a minute, and ends the process then."""
    node = own_node()
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


def living_nodes() -> tuple[Node, ...]:
    """The nodes that live, this process's own first."""
    nodes = [
        Node(info["NodeID"], info["NodeManagerAddress"], dict(info["Resources"]))
        for info in ray.nodes()
        if info["Alive"]
    ]
    here = ray.get_runtime_context().get_node_id()
    return tuple(sorted(nodes, key=lambda node: (node.node_id != here, node.node_id)))


def without_drained(nodes: Sequence[Node], going: Collection[str]) -> tuple[Node, ...]:
    """Nodes that take something new; this process's own stays the first, without resources where it is drained.

    Args:
        nodes: Living ones, this process's own first.
        going: Ids of those that are drained. Where that is all, nothing is left out: Ray says what it misses.

    >>> here, there = (Node(name, "10.0.0.1", {"CPU": 4.0}) for name in ("here", "there"))
    >>> [(node.node_id, node.num_cpus) for node in without_drained((here, there), {"here"})]
    [('here', 0), ('there', 4)]
    """
    if all(node.node_id in going for node in nodes):
        return tuple(nodes)
    here, *others = nodes
    first = replace(here, resources={}) if here.node_id in going else here
    return (first, *(node for node in others if node.node_id not in going))


def title_of_this_node() -> str:
    """The `Node.title` of the node that this process is on."""
    return Node(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), {}).title


def address_of(host: str) -> str:
    """The address of a host as Ray's nodes have it; the host itself where nobody knows it. May ask a name server."""
    try:
        found = socket.gethostbyname(host)
    except (OSError, UnicodeError):
        return host
    return living_nodes()[0].address if ipaddress.ip_address(found).is_loopback else found


def place(
    bundles: Sequence[Mapping[str, float]], *, strategy: str, timeout_s: float, holder: str = "a strategy"
) -> PlacementGroup:
    """Reserve one bundle per replica; wait until all are there.

    An autoscaling cluster may still grow, so a request that does not fit now waits too, but never beyond `timeout_s`.
    Strategies of this process that the program has dropped give back what they hold first.

    Args:
        bundles: Resources of each.
        strategy: Ray's placement strategy.
        timeout_s: The limit.
        holder: What messages call the strategy that asks.

    Raises:
        DeadlineExceededError: Not placed in time, or strategies of this process hold what is missing, which ends the
            wait early; says what was asked for, what each node has, and who holds it.
        FailedPreconditionError: It can never be, on the nodes that there are or that an autoscaler may add.
        InvalidArgumentError: One of them takes nothing.
    """
    for bundle in bundles:
        if not any(amount > 0 for amount in bundle.values()):
            raise InvalidArgumentError(
                f"Each replica and server must take some of a Ray resource, by which it is placed, got {dict(bundle)}. "
                'Give it a part of a CPU, say: {"CPU": 0.01}.'
            )
    group: PlacementGroup = placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
    request = Request(tuple(bundles), strategy, key=group.id.hex(), what="replicas")
    grows = False if any(_STARTED_HERE in node.resources for node in living_nodes()) else None
    try:
        if _held and not group.wait(_AT_ONCE_S):
            gc.collect()  # closes strategies that only cycles of references keep
        if await_placed(request, group.wait, timeout_s=timeout_s, grows=grows, require_room=_require_room):
            hosts = hosts_of(group)
            _held[group.id.hex()] = _Held(holder, tuple(zip(hosts, bundles, strict=True)))
            return group
        raise DeadlineExceededError(
            f"The cluster could not place {len(bundles)} replicas within {timeout_s:g} s. Asked: {request}. There is: "
            f"{_describe_nodes()}. {_describe_held()}Use fewer replicas, give each less (resources_per_replica), add "
            "nodes, or raise Timeouts.start_s where the cluster grows itself."
        )
    except BaseException:
        remove_placement_group(group)
        raise


def waits_for_own(bundles: Sequence[Mapping[str, float]], strategy: str) -> bool:
    """Return True where only reservations of this process keep what is asked for from being placed."""
    if not _held:
        return False
    free = free_resources()
    if why_never(bundles, list(free.values()), strategy) is None:
        return False
    for each in _held.values():
        for node, amounts in each.taken:
            if node in free:
                free[node] = {
                    name: free[node].get(name, 0.0) + amounts.get(name, 0.0) for name in {**free[node], **amounts}
                }
    return why_never(bundles, list(free.values()), strategy) is None


def _require_room(request: Request) -> None:
    """Raise where strategies of this process hold what is missing: nobody else can give it back.

    Raises:
        DeadlineExceededError: They do; names them.
    """
    held = list(_held.values())
    taken = [(node, amounts) for each in held for node, amounts in each.taken]
    left = [_without(node, [amounts for where, amounts in taken if where == node.node_id]) for node in living_nodes()]
    reason = why_never(request.bundles, left, request.strategy)
    if taken and reason is not None:
        raise DeadlineExceededError(
            f"The replicas must have room beside other strategies of this process, but {reason}. Asked: {request}. "
            f"There is: {_describe_nodes()}. {_describe_held()}Close those that are not needed (strategy.close()), or "
            "all strategies of this process (rd.close_all()). In a notebook, a result that was displayed (Out, _) "
            "keeps its strategy."
        )


def _without(node: Node, taken: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: amount - sum(each.get(name, 0.0) for each in taken) for name, amount in node.resources.items()}


def _describe_held() -> str:
    held = [
        f"{each.holder} holds {describe_amounts([amounts for _, amounts in each.taken])}" for each in _held.values()
    ]
    return f"{'; '.join(held)}. " if held else ""


def hosts_of(group: PlacementGroup) -> tuple[str, ...]:
    """The id of the node that each bundle of a placed group is on, in the order of the bundles."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return tuple(nodes[index] for index in range(len(nodes)))


def address_for(hosts: Sequence[str], address: str) -> str:
    """Where these nodes reach this process: at `address`, but for nodes that were added since that was chosen."""
    here = ray.get_runtime_context().get_node_id()
    if address == _LOOPBACK and set(hosts) != {here}:
        reached_at: str = ray.util.get_node_ip_address()
        return reached_at
    return address


def release(group: PlacementGroup) -> None:
    """Give the reservation back; every actor still in it is killed."""
    _held.pop(group.id.hex(), None)
    if ray.is_initialized():
        with contextlib.suppress(Exception):  # of another Ray, by now: it went with that
            remove_placement_group(group)


def _describe_nodes() -> str:
    free = free_resources()
    return "; ".join(
        f"node {node.address}: " + ", ".join(_describe_resource(node, free, name) for name in ("CPU", "GPU"))
        for node in living_nodes()
    )


def _describe_resource(node: Node, free: Mapping[str, Mapping[str, float]], name: str) -> str:
    have = node.resources.get(name, 0)
    return f"{have:g} {name} ({free.get(node.node_id, {}).get(name, 0):g} free)"
