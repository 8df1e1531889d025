"""Plan workers and parameter servers for the cluster, and start them on its nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, final

from raydist.actors.parameter_servers import ServerActors
from raydist.actors.replica import ReplicaActors, ReplicaSlot, console_settings
from raydist.actors.worker_actors import WorkerActors
from raydist.checkpoints.ps_reader import ServerReader
from raydist.checkpoints.ps_save import ServerWriter
from raydist.cluster.nodes import Cluster, Node, living_nodes, place, release
from raydist.cluster.reservation import Reservation
from raydist.context.cluster_resolver import ClusterResolver, host_of
from raydist.coordinator.coordinator import Coordinator
from raydist.coordinator.ps_servers import PsServers
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.options import CommunicationOptions, Timeouts
from raydist.parameter_servers.consistency import BoundedStaleness, Consistency
from raydist.parameter_servers.server import ParameterServer
from raydist.parameter_servers.slices import VariablePartitioner
from raydist.replicas.launch import make_setups
from raydist.replicas.step import ReplicaSetup, with_hosts

_JOBS = {"chief", "worker", "ps", "evaluator"}
_MARK = 0.001  # of the resource "node:<address>", of which each node has 1: binds a bundle to the node
_WORKERS_A_SERVER = 4


@final
@dataclass(frozen=True, slots=True)
class PsRequest:
    """The user's request; None and empty fields are left to `plan_ps`."""

    num_workers: int | None = None  # number of workers
    num_ps: int | None = None
    worker_resources: Mapping[str, float] | None = None  # Ray resources of one worker
    server_resources: Mapping[str, float] | None = None  # Ray resources of one server
    worker_hosts: tuple[str, ...] = ()  # the host of each worker
    server_hosts: tuple[str, ...] = ()  # the host of each server

    def __post_init__(self) -> None:
        for name, count in (("num_workers", self.num_workers), ("num_ps", self.num_ps)):
            if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
                what = "worker" if name == "num_workers" else "parameter server"
                raise InvalidArgumentError(
                    f"{name} must be >= 1, or None to leave it open, got {count!r}: training needs at least one {what}."
                )

    def with_resolver(self, resolver: ClusterResolver) -> PsRequest:
        """Return this request completed by a cluster resolver (or TF_CONFIG, by a resolver that reads it)."""
        spec = resolver.cluster_spec()
        if not spec:
            return self
        jobs = spec.as_dict()
        if not set(jobs) <= _JOBS or not jobs.get("worker") or not jobs.get("ps") or len(jobs.get("chief", ())) > 1:
            raise InvalidArgumentError(
                'The cluster must have tasks of the jobs "worker" and "ps", at most one "chief" and perhaps an '
                f'"evaluator", got {jobs}. Name the workers and servers, and leave other jobs out.'
            )
        _require_driver(resolver)
        workers, servers = (tuple(map(host_of, jobs[job])) for job in ("worker", "ps"))
        return replace(
            self,
            num_workers=_agreed("num_workers", self.num_workers, workers),
            num_ps=_agreed("num_ps", self.num_ps, servers),
            worker_hosts=workers,
            server_hosts=servers,
        )


def _agreed(name: str, count: int | None, hosts: tuple[str, ...]) -> int:
    if count not in (None, len(hosts)):
        raise InvalidArgumentError(
            f"{name} is {count}, but the cluster resolver names {len(hosts)}: {', '.join(hosts)}. Leave {name} out."
        )
    return len(hosts)


def _require_driver(resolver: ClusterResolver) -> None:
    """Require that this process is the driver: the chief or, without a chief, worker 0 or a process that is no task."""
    kind = resolver.task_type
    first = "chief" if resolver.cluster_spec().as_dict().get("chief") else "worker"
    if kind not in (None, first) or (resolver.task_id or 0) != 0:
        raise InvalidArgumentError(
            f"The program must run once, as task {first} 0, and drives all workers and servers; this process is task "
            f"{kind} {resolver.task_id}. On the other machines run `ray start --address=...` and no program."
        )


@final
@dataclass(frozen=True, slots=True)
class PsPlan:
    """The processes to start."""

    setups: tuple[ReplicaSetup, ...]  # one for each worker; each worker is a process group of its own
    worker_resources: Mapping[str, float]  # Ray resources of each worker
    server_resources: Mapping[str, float]  # Ray resources of each server
    num_ps: int
    bundles: tuple[Mapping[str, float], ...]  # bundles to reserve: those of the servers, then those of the workers


def plan_ps(
    name: str,
    request: PsRequest,
    cluster: Cluster,
    timeouts: Timeouts,
    *,
    worker_addresses: tuple[str, ...] = (),
    server_addresses: tuple[str, ...] = (),
) -> PsPlan:
    """Plan the processes for a request, on the cluster as it is now.

    Args:
        worker_addresses: The node of each worker; empty: any.
        server_addresses: The node of each server; empty: any.
    """
    kind = "GPU" if any(node.num_gpus for node in cluster.nodes) else "CPU"
    num_workers = request.num_workers or _default_workers(cluster.nodes, kind)
    num_ps = request.num_ps or _default_servers(num_workers)
    wanted = dict(request.worker_resources or cluster.replica_resources(kind))
    if request.worker_resources is not None:
        kind = "GPU" if wanted.get("GPU") else "CPU"
    server = dict(request.server_resources or cluster.replica_resources("CPU"))
    bundles = (
        *_placed(server, num_ps, server_addresses),
        *_placed(wanted, num_workers, worker_addresses),
    )
    return PsPlan(_setups(name, num_workers, kind, timeouts), wanted, server, num_ps, bundles)


def _default_workers(nodes: tuple[Node, ...], kind: str) -> int:
    """Return one worker a GPU; without GPUs one a node, or on a single node one a core that no server needs."""
    if kind == "GPU":
        return sum(node.num_gpus for node in nodes)
    if len(nodes) > 1:
        return len(nodes)
    num_cores = nodes[0].num_cpus
    return next((count for count in range(num_cores, 1, -1) if count + _default_servers(count) <= num_cores), 1)


def _default_servers(num_workers: int) -> int:
    return max(1, num_workers // _WORKERS_A_SERVER)


def _placed(bundle: Mapping[str, float], count: int, addresses: tuple[str, ...]) -> tuple[Mapping[str, float], ...]:
    return tuple({**bundle, f"node:{address}": _MARK} for address in addresses) or (bundle,) * count


def _setups(name: str, num_workers: int, kind: str, timeouts: Timeouts) -> tuple[ReplicaSetup, ...]:
    setups: tuple[Any, ...] = make_setups(
        name,
        tuple(f"/job:worker/replica:0/task:{worker}/device:{kind}:0" for worker in range(num_workers)),
        kind=kind,
        per_worker=1,
        num_threads=1,  # until their nodes are known
        timeouts=timeouts,
        communication=CommunicationOptions(),
    )
    return tuple(replace(setup, world_size=1, worker_devices=(setup.worker_devices[setup.rank],)) for setup in setups)


_T = TypeVar("_T")


@final
class Launched:
    """Workers and servers that start and stop together. The constructor does not block.

    Attributes:
        worker_hosts: The node id of each worker.
        server_hosts: The node id of each server.
    """

    def __init__(
        self, setups: Sequence[ReplicaSetup], workers: WorkerActors, servers: ServerActors, hosts: Sequence[str]
    ) -> None:
        num_ps = len(servers.names)
        self.server_hosts, self.worker_hosts = tuple(hosts[:num_ps]), tuple(hosts[num_ps:])
        self._setups = tuple(setups)
        self._workers = workers
        self._servers = servers
        self._side: PsServers | None = None
        self._coordinator: Coordinator | None = None

    def start(
        self,
        timeouts: Timeouts,
        *,
        consistency: Consistency,
        partitioner: VariablePartitioner | None,
        prefetch_pulls: bool,
        server_memory: int | None,
    ) -> None:
        """Wait for the servers (limit: `Timeouts.start_s`), and start the workers without waiting for them."""
        limit_s = timeouts.collective_s
        terms = (len(self._servers.names), consistency, server_memory)
        self._servers.start(make_server, *terms, within_s=timeouts.start_s)
        self._side = PsServers(
            self._setups,
            self._servers,
            consistency=consistency,
            partitioner=partitioner,
            prefetch_pulls=prefetch_pulls,
            timeout_s=limit_s,
        )
        max_clocks = consistency.max_clocks if isinstance(consistency, BoundedStaleness) else None
        self._coordinator = Coordinator(self._workers, self._side, len(self._setups), timeouts, max_clocks)
        self._coordinator.start()

    @property
    def side(self) -> PsServers:
        """The driver's connection to the servers."""
        return _started(self._side)

    @property
    def coordinator(self) -> Coordinator:
        """The scheduler of closures."""
        return _started(self._coordinator)

    def close(self) -> None:
        """Stop everything. May be called twice."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._workers.kill)
            stack.callback(self._servers.kill)
            if self._coordinator is not None:
                stack.callback(self._coordinator.close)


def _started(part: _T | None) -> _T:
    if part is None:
        raise FailedPreconditionError("raydist bug: servers and workers must have been started before they are used.")
    return part


def make_server(number: int, num_servers: int, consistency: Consistency, memory: int | None) -> ParameterServer:
    """Create a parameter server in the calling process."""
    return ParameterServer(
        number,
        num_servers,
        consistency,
        memory=memory,
        saver=ServerWriter(),
        restorer=ServerReader(),
    )


def launch_ps(plan: PsPlan, timeouts: Timeouts, holder: str) -> Launched:
    """Reserve resources and start the processes; returns before they answer.

    Blocks until the reservation is made (limit: `Timeouts.start_s`). Servers and workers are spread over the nodes, so
    that servers have nodes of their own where there are enough. `holder` names the strategy in messages.
    """
    reservation = place(plan.bundles, strategy="SPREAD", timeout_s=timeouts.start_s, holder=holder)
    try:
        return _start_actors(plan, reservation, timeouts)
    except BaseException:
        release(reservation)
        raise


def _start_actors(plan: PsPlan, reservation: Reservation, timeouts: Timeouts) -> Launched:
    hosts = reservation.hosts
    nodes = {node.node_id: node for node in living_nodes()}
    setups = with_hosts(plan.setups, hosts[plan.num_ps :], nodes)
    name = setups[0].name
    servers = ServerActors(
        reservation,
        [nodes[host].title if host in nodes else "" for host in hosts[: plan.num_ps]],
        name=name,
        resources=plan.server_resources,
        num_workers=len(setups),
        limit_s=timeouts.collective_s,
    )
    slots = [
        ReplicaSlot(
            bundle=plan.num_ps + setup.rank,
            resources=plan.worker_resources,
            env={"OMP_NUM_THREADS": str(setup.num_threads), **console_settings()},
            host=setup.host,
            node_id=hosts[plan.num_ps + setup.rank],
        )
        for setup in setups
    ]
    workers = WorkerActors(ReplicaActors(reservation, slots, name=name, kind="worker"))
    return Launched(setups, workers, servers, hosts)
