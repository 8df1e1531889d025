"""The Ray cluster of a strategy: start a local Ray, or join a running cluster.

Besides `placement`, `actors/` and `collectives/ray_backend.py` only this module imports ray.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import ipaddress
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import final

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from raydist.cluster.placement import Request, await_placed, describe_amounts
from raydist.cluster.ray_session import draining_nodes
from raydist.cluster.reservation import Reservation, captured_group, has_room, reserve_within
from raydist.cluster.resource_check import why_never
from raydist.compat.ray_internals import free_resources, init_local, own_node
from raydist.core.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError

NODE_MARK = 0.001
"""A part of the resource "node:<address>", of which each node has 1: a request for that node that takes nothing."""

_STARTED_HERE = "raydist_local"  # custom resource of a Ray that raydist started; it lives as long as the cluster
_SHARED_CPU = 0.001  # on such a Ray, replicas and input workers share the cores, so that any count fits
# Ray frees objects once a second by default: by then an input pipeline has written 300 MB into fresh pages, at twice
# the cost of reused ones (0.55 against 0.28 ms of CPU for a batch of 400 KB).
_FREE_AT_ONCE = {"free_objects_period_milliseconds": 0}
_LOOK_S = 0.5  # period of the check for a shutdown of Ray
_NEEDED = {"gcs_server", "raylet"}  # processes that Ray cannot run without
_LOOPBACK = "127.0.0.1"
_CONNECT_S = 10.0  # for one TCP connection to a cluster's address

_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray's description of the job, for the job's driver

_TOO_SLOW = "timed out during startup"  # in the message of Ray's error
_AT_ONCE_S = 0.2  # bundles that fit are placed within this time

_log = logging.getLogger("raydist")


@final
@dataclass(frozen=True, slots=True)
class _Held:
    """A reservation of this process: its holder, and the resources taken from each node."""

    holder: str
    taken: tuple[tuple[str, Mapping[str, float]], ...]


_held: dict[str, _Held] = {}
"""The active reservations of this process, by the id of their placement group."""


@final
@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the cluster, with its total resources."""

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
        """The node's name in messages: several nodes may have one address."""
        return f"node {self.address} ({self.node_id[:8]})"


@final
@dataclass(frozen=True, slots=True)
class Cluster:
    """The cluster that this process is connected to.

    Attributes:
        started_here: True if raydist started Ray: Ray lives until this process ends, and its cores are shared freely.
        nodes: Living nodes, this process's own first, without nodes that are being drained.
    """

    started_here: bool
    nodes: tuple[Node, ...]

    def best_node(self) -> Node:
        """Return the node with most GPUs; without any, this process's own if it has CPUs, else the one with most."""
        gpu_node = max(self.nodes, key=lambda node: node.num_gpus)
        if gpu_node.num_gpus:
            return gpu_node
        return self.nodes[0] if self.nodes[0].num_cpus else max(self.nodes, key=lambda node: node.num_cpus)

    def replica_resources(self, kind: str) -> dict[str, float]:
        """Return the default resources of one replica on a "GPU" or a "CPU"."""
        return {"GPU": 1.0} if kind == "GPU" else {"CPU": _SHARED_CPU if self.started_here else 1.0}

    def store_host(self) -> str:
        """Return this machine's address for the other nodes; loopback if there are none."""
        return "127.0.0.1" if len(self.nodes) == 1 else self.nodes[0].address


def connect() -> Cluster:
    """Join the cluster of this process or of RAY_ADDRESS; start Ray on this machine if there is none.

    Blocks until Ray is up (with Ray's own limits). A Ray started here is kept for later strategies.
    """
    ensure_ray()
    nodes = living_nodes()
    return Cluster(_STARTED_HERE in nodes[0].resources, without_drained(nodes, draining_nodes()))


def ensure_ray() -> None:
    """Connect to Ray as :func:`connect` does, without describing the cluster: 1 ms less."""
    if not ray.is_initialized():
        _initialize()
    _require_living()


def connected() -> Cluster | None:
    """Return the cluster that this process is connected to, or None; starts nothing."""
    return connect() if ray.is_initialized() else None


def _initialize() -> None:
    address = os.environ.get("RAY_ADDRESS")
    with _keeping_breakpoints():
        if address:  # set by `ray job submit` or by the user
            _join(address)
        else:
            run_where_it_lasts(_start, _await_end, name="raydist-keeps-ray")


def run_where_it_lasts(start: Callable[[], None], await_end: Callable[[], None], *, name: str) -> None:
    """Call `start` in a thread that lasts as long as the started processes; return, or raise, once `start` has ended.

    Linux signals a child with PR_SET_PDEATHSIG when the *thread* that started it ends, not the process.

    Args:
        start: Starts child processes.
        await_end: Returns when the processes have ended. Called in the new thread, which ends then, or with the
            process. Not called if this is the main thread, which needs no other thread.
        name: Name of the new thread.
    """
    if threading.current_thread() is threading.main_thread():
        start()
        return
    started: Future[None] = Future()
    threading.Thread(target=_start_and_wait, args=(start, await_end, started), name=name, daemon=True).start()
    started.result()


def _start_and_wait(start: Callable[[], None], await_end: Callable[[], None], started: Future[None]) -> None:
    try:
        start()
    except BaseException as error:
        started.set_exception(error)
        return
    started.set_result(None)
    await_end()


@contextlib.contextmanager
def _keeping_breakpoints() -> Iterator[None]:
    """Keep `breakpoint()` as pdb in this process: Ray redirects it to debugpy, which may not be installed."""
    before = os.environ.get("PYTHONBREAKPOINT")
    try:
        yield
    finally:
        if os.environ.get("RAY_DEBUG") != "legacy" and importlib.util.find_spec("debugpy") is None:
            os.environ.pop("PYTHONBREAKPOINT", None)
            os.environ.update({} if before is None else {"PYTHONBREAKPOINT": before})


def _start() -> None:
    """Start Ray, once more if a busy machine was too slow for the 30 s that Ray allows its processes."""
    for is_last in (False, True):
        try:
            init_local(
                _FREE_AT_ONCE, include_dashboard=False, logging_level=logging.WARNING, resources={_STARTED_HERE: 1}
            )
            return
        except Exception as error:  # Ray has no class for this error
            if _TOO_SLOW not in str(error):
                raise
            ray.shutdown()
            if is_last:
                raise DeadlineExceededError(
                    "A local Ray must start within the 30 s that Ray allows, but it was too slow twice: the machine is "
                    "busy. Try again, or start Ray before (`ray start --head`) and set RAY_ADDRESS=auto."
                ) from error


def _await_end() -> None:
    """Return once the Ray that was started here is shut down."""
    node = own_node()
    while own_node() is node:
        time.sleep(_LOOK_S)


def _require_living() -> None:
    """Raise if the Ray of this process has died: Ray itself would wait for a minute, and end the process."""
    node = own_node()
    ended: set[str] = set() if node is None else {name for name, _ in node.dead_processes()}
    dead = sorted(ended & _NEEDED)
    if dead:
        raise UnavailableError(
            f"The Ray that this process has started must be running, but its {' and '.join(dead)} ended: killed, or "
            "started by ray.init() in a thread that has ended since (Ray dies with that thread). Call ray.shutdown() "
            "and go on, and start Ray from the main thread or leave starting it to raydist."
        )


def script_folder_for_workers(environ: Mapping[str, str], argv0: str, sys_path: Sequence[str]) -> dict[str, str]:
    """Return environment variables that add the script's folder to the import path of the workers of this driver.

    Ray adds the folder outside of jobs, but not in a job with a working directory: then only the driver could import a
    module beside a script in a subfolder. Returns nothing if Ray adds the folder itself.

    Args:
        environ: The driver's environment.
        argv0: Path of the script, `sys.argv[0]`.
        sys_path: The driver's `sys.path`. With `python -m` it does not contain the script's folder.

    >>> job = {"RAY_JOB_CONFIG_JSON_ENV_VAR": '{"runtime_env": {"working_dir": "gcs://package.zip"}}'}
    >>> script_folder_for_workers(job, "/package/examples/train.py", ["/package/examples"])
    {'PYTHONPATH': '/package/examples'}
    >>> script_folder_for_workers({}, "/home/me/train.py", ["/home/me"])
    {}
    """
    submitted = json.loads(environ.get(_JOB_CONFIG) or "{}").get("runtime_env") or {}
    folder = os.path.dirname(os.path.realpath(argv0))
    # Ray refuses a variable that the job sets itself; a job that sets PYTHONPATH is responsible for it.
    decided = "PYTHONPATH" in (submitted.get("env_vars") or {})
    if "working_dir" not in submitted or folder not in sys_path or decided:
        return {}
    return {"PYTHONPATH": folder}


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
    """Raise if nothing listens at the address: ray.init would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():  # "auto" and "local" name no port
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()


def living_nodes() -> tuple[Node, ...]:
    """Return the living nodes, this process's own first."""
    nodes = [
        Node(info["NodeID"], info["NodeManagerAddress"], dict(info["Resources"]))
        for info in ray.nodes()
        if info["Alive"]
    ]
    here = ray.get_runtime_context().get_node_id()
    return tuple(sorted(nodes, key=lambda node: (node.node_id != here, node.node_id)))


def without_drained(nodes: Sequence[Node], going: Collection[str]) -> tuple[Node, ...]:
    """Return the nodes that accept new work. This process's node stays first, without resources if it is drained.

    Args:
        nodes: Living nodes, this process's own first.
        going: Ids of nodes that are being drained. If all nodes are, none is left out: Ray reports what is missing.

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
    """Return the `Node.title` of this process's node."""
    return Node(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), {}).title


def address_of(host: str) -> str:
    """Return a host's address as Ray's nodes have it, or the host itself if unknown. May query a name server."""
    try:
        found = socket.gethostbyname(host)
    except (OSError, UnicodeError):
        return host
    return living_nodes()[0].address if ipaddress.ip_address(found).is_loopback else found


def place(
    bundles: Sequence[Mapping[str, float]], *, strategy: str, timeout_s: float, holder: str = "a strategy"
) -> Reservation:
    """Reserve one bundle per replica; block until all are placed.

    In an actor or a task whose placement group captures its children, the bundles are those of that group.

    A request that does not fit now waits for at most `timeout_s`, because the cluster may have an autoscaler.
    Strategies of this process that the program has dropped release their reservations first.

    Args:
        bundles: Resources of each bundle.
        strategy: Ray's placement strategy.
        timeout_s: Longest wait in seconds.
        holder: Name of the requesting strategy in messages.

    Raises:
        DeadlineExceededError: Not placed in time, or strategies of this process hold the resources, which ends the wait
            early; names the request, the resources of each node, and the holders.
        FailedPreconditionError: The nodes, with those that an autoscaler may add, can never hold the bundles.
        InvalidArgumentError: A bundle takes no resource.
    """
    for bundle in bundles:
        if not any(amount > 0 for amount in bundle.values()):
            raise InvalidArgumentError(
                f"Each replica and server must take some of a Ray resource, by which it is placed, got {dict(bundle)}. "
                'Give it a part of a CPU, say: {"CPU": 0.01}.'
            )
    captured = captured_group()
    if captured is not None:
        return reserve_within(captured, bundles, strategy=strategy, timeout_s=timeout_s)
    group: PlacementGroup = placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
    request = Request(tuple(bundles), strategy, key=group.id.hex(), what="replicas")
    grows = False if any(_STARTED_HERE in node.resources for node in living_nodes()) else None
    try:
        if _held and not group.wait(_AT_ONCE_S):
            gc.collect()  # closes strategies in reference cycles
        if await_placed(request, group.wait, timeout_s=timeout_s, grows=grows, require_room=_require_room):
            reservation = Reservation.of_group(group)
            _held[group.id.hex()] = _Held(holder, tuple(zip(reservation.hosts, bundles, strict=True)))
            return reservation
        raise DeadlineExceededError(
            f"The cluster could not place {len(bundles)} replicas within {timeout_s:g} s. Asked: {request}. There is: "
            f"{_describe_nodes()}. {_describe_held()}Use fewer replicas, give each less (resources_per_replica), add "
            "nodes, or raise Timeouts.start_s where the cluster grows itself."
        )
    except BaseException:
        remove_placement_group(group)
        raise


@final
class PlaceRequest:
    """A request for a bundle that waits in the cluster, so that an autoscaler adds a node. Does not block.

    Within a placement group that captures this actor's children, the bundle is looked for there.
    """

    def __init__(self, bundle: Mapping[str, float], *, holder: str) -> None:
        self._bundle, self._holder = dict(bundle), holder
        self._captured = captured_group()
        self._group = placement_group([self._bundle]) if self._captured is None else None

    @property
    def is_placed(self) -> bool:
        """True if the bundle is reserved, or has room in the placement group now."""
        if self._group is not None:
            return bool(self._group.wait(0))
        return self._captured is not None and has_room(self._captured, [self._bundle])

    def take(self) -> Reservation:
        """Return the reservation, which the caller releases."""
        if self._group is None:
            return place([self._bundle], strategy="PACK", timeout_s=_AT_ONCE_S, holder=self._holder)
        group, self._group = self._group, None
        reservation = Reservation.of_group(group)
        _held[group.id.hex()] = _Held(self._holder, tuple(zip(reservation.hosts, [self._bundle], strict=True)))
        return reservation

    def cancel(self) -> None:
        """Withdraw the request, unless the reservation was taken."""
        if self._group is not None and ray.is_initialized():
            remove_placement_group(self._group)
        self._group = None


def waits_for_own(bundles: Sequence[Mapping[str, float]], strategy: str) -> bool:
    """Return True if the bundles would fit without the reservations of this process."""
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
    """Raise if strategies of this process hold the missing resources: waiting cannot help.

    Raises:
        DeadlineExceededError: The resources are held; names the strategies.
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


def address_for(hosts: Sequence[str], address: str) -> str:
    """Return this process's address for the nodes `hosts`: not loopback if nodes were added since it was chosen."""
    here = ray.get_runtime_context().get_node_id()
    if address == _LOOPBACK and set(hosts) != {here}:
        reached_at: str = ray.util.get_node_ip_address()
        return reached_at
    return address


def release(reservation: Reservation) -> None:
    """Remove the reservation; Ray kills every actor in it. A captured group stays: its maker removes it."""
    if reservation.is_captured:
        return
    _held.pop(reservation.group.id.hex(), None)
    if ray.is_initialized():
        with contextlib.suppress(Exception):  # the group may belong to a Ray that was shut down
            remove_placement_group(reservation.group)


def _describe_nodes() -> str:
    free = free_resources()
    return "; ".join(
        f"node {node.address}: " + ", ".join(_describe_resource(node, free, name) for name in ("CPU", "GPU"))
        for node in living_nodes()
    )


def _describe_resource(node: Node, free: Mapping[str, Mapping[str, float]], name: str) -> str:
    have = node.resources.get(name, 0)
    return f"{have:g} {name} ({free.get(node.node_id, {}).get(name, 0):g} free)"
