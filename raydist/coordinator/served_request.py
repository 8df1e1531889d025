"""The workers and servers that a user asks for, and the plan of processes that follows for the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from raydist.cluster import Cluster, Node
from raydist.context.cluster_resolver import ClusterResolver, host_of
from raydist.errors import InvalidArgumentError
from raydist.options import CommunicationOptions, Timeouts
from raydist.replicas.launch import make_setups
from raydist.replicas.step import ReplicaSetup

__all__ = ["ServedPlan", "ServedRequest", "plan_served"]

_JOBS = {"chief", "worker", "ps", "evaluator"}
_MARK = 0.001  # of the resource "node:<address>", of which each node has 1: binds a bundle to the node
_WORKERS_A_SERVER = 4


@final
@dataclass(frozen=True, slots=True)
class ServedRequest:
    """The user's request; None and empty fields are left to `plan_served`.

    Attributes:
        num_workers: Number of workers.
        num_ps: Number of servers.
        worker_resources: Ray resources of one worker.
        server_resources: Ray resources of one server.
        worker_hosts: The host of each worker.
        server_hosts: The host of each server.
    """

    num_workers: int | None = None
    num_ps: int | None = None
    worker_resources: Mapping[str, float] | None = None
    server_resources: Mapping[str, float] | None = None
    worker_hosts: tuple[str, ...] = ()
    server_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, count in (("num_workers", self.num_workers), ("num_ps", self.num_ps)):
            if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
                what = "worker" if name == "num_workers" else "parameter server"
                raise InvalidArgumentError(
                    f"{name} must be >= 1, or None to leave it open, got {count!r}: training needs at least one {what}."
                )

    def with_resolver(self, resolver: ClusterResolver) -> ServedRequest:
        """Return this request completed by a cluster resolver (or TF_CONFIG, by a resolver that reads it).

        Raises:
            InvalidArgumentError: The resolver contradicts this request, names other jobs, or names no worker or server.
        """
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
class ServedPlan:
    """The processes to start.

    Attributes:
        setups: One for each worker; each worker is a process group of its own.
        worker_resources: Ray resources of each worker.
        server_resources: Ray resources of each server.
        num_ps: Number of servers.
        bundles: Bundles to reserve: those of the servers, then those of the workers.
    """

    setups: tuple[ReplicaSetup, ...]
    worker_resources: Mapping[str, float]
    server_resources: Mapping[str, float]
    num_ps: int
    bundles: tuple[Mapping[str, float], ...]


def plan_served(
    name: str,
    request: ServedRequest,
    cluster: Cluster,
    timeouts: Timeouts,
    *,
    worker_addresses: tuple[str, ...] = (),
    server_addresses: tuple[str, ...] = (),
) -> ServedPlan:
    """Plan the processes for a request, on the cluster as it is now.

    Args:
        name: The strategy's unique name.
        request: The user's request.
        cluster: The nodes and their resources.
        timeouts: The limit of every wait.
        worker_addresses: The node of each worker; empty: any.
        server_addresses: The node of each server; empty: any.
    """
    kind = "GPU" if any(node.num_gpus for node in cluster.nodes) else "CPU"
    num_workers = request.num_workers or _default_workers(cluster.nodes, kind)
    num_ps = request.num_ps or _default_servers(num_workers)
    wanted = dict(request.worker_resources or cluster.replica_resources(kind))
    if request.worker_resources is not None:
        kind = "GPU" if wanted.get("GPU") else "CPU"
    server = dict(request.server_resources or cluster.cpu_replica_resources())
    bundles = (
        *_placed(server, num_ps, server_addresses),
        *_placed(wanted, num_workers, worker_addresses),
    )
    return ServedPlan(_setups(name, num_workers, kind, timeouts), wanted, server, num_ps, bundles)


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
