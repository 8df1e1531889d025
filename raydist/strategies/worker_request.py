"""A user's request for workers: by numbers, a cluster resolver, or Ray Train's ScalingConfig. Does no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from raydist.cluster.nodes import Node
from raydist.context.cluster_resolver import ClusterResolver, host_of
from raydist.core.errors import InvalidArgumentError

_PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_JOBS = {"chief", "worker", "evaluator"}


@final
@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """A request for workers; None and empty values are left open.

    Attributes:
        num_workers: Number of workers.
        devices: Devices of each worker: a count or names.
        resources: Ray resources of one replica.
        placement: Ray's placement strategy.
        hosts: Host of each worker.
    """

    num_workers: int | None = None
    devices: int | Sequence[Any] | Any = None
    resources: Mapping[str, float] | None = None
    placement: str | None = None
    hosts: tuple[str, ...] = ()

    def with_resolver(self, resolver: ClusterResolver) -> WorkerRequest:
        """Return this request with the values of a cluster resolver.

        Raises:
            InvalidArgumentError: The resolver contradicts this request, or this process is not its first task.
        """
        spec = resolver.cluster_spec()
        if not spec:
            _require_first(resolver)
            return self
        if not set(spec.jobs) <= _JOBS or not resolver.master():
            raise InvalidArgumentError(
                f'The cluster must have tasks of the jobs "chief" and "worker", got {spec.as_dict()}. Name the '
                "workers, and leave other jobs out."
            )
        _require_listed(resolver)
        _require_driver(resolver)
        hosts = tuple(host_of(address) for job in ("chief", "worker") for address in spec.as_dict().get(job, ()))
        gpus = resolver.num_accelerators().get("GPU", 0)
        return replace(
            self._with_number(len(hosts), f"the cluster resolver (TF_CONFIG?) names {len(hosts)}: {', '.join(hosts)}"),
            devices=self.devices if self.devices is not None or not gpus else [f"GPU:{i}" for i in range(gpus)],
            placement="STRICT_SPREAD",
            hosts=hosts,
        )

    def with_scaling_config(self, config: Any) -> WorkerRequest:
        """Return this request with a `ray.train.ScalingConfig`: its workers are replicas, of one device each.

        Raises:
            InvalidArgumentError: `config` is not a ScalingConfig, contradicts this request, or is not supported.
        """
        count = getattr(config, "num_workers", None)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1 or not hasattr(config, "use_gpu"):
            raise InvalidArgumentError(
                "cluster_resolver must be an rd.ClusterResolver, or a ray.train.ScalingConfig with its number of "
                f"workers, got {config!r:.300}."
            )
        placement = getattr(config, "placement_strategy", "PACK")
        if placement not in _PLACEMENTS or getattr(config, "use_tpu", False):
            raise InvalidArgumentError(
                f"A ScalingConfig must have no TPUs and a placement_strategy of {', '.join(_PLACEMENTS)}, got "
                f"{config!r:.300}."
            )
        said = dict(getattr(config, "resources_per_worker", None) or {})
        gpus = int(said.get("GPU", 1 if config.use_gpu else 0))
        devices: list[str] = [f"{'GPU' if gpus else 'CPU'}:{index}" for index in range(max(1, gpus))]
        return replace(
            self._with_number(count, f"the ScalingConfig has {count}"),
            devices=devices if self.devices is None else self.devices,
            resources=self.resources or {name: amount / len(devices) for name, amount in said.items()} or None,
            placement=placement,
        )

    def _with_number(self, count: int, said: str) -> WorkerRequest:
        if self.num_workers not in (None, count):
            raise InvalidArgumentError(
                f"num_workers must be the number of workers, but it is {self.num_workers}, and {said}. Leave "
                "num_workers out."
            )
        return replace(self, num_workers=count)


def _require_first(resolver: ClusterResolver) -> None:
    """Raise if the resolver names no cluster, but a task other than the first."""
    if resolver.task_id:
        raise InvalidArgumentError(
            f"A task must be one of the cluster's, but this process is task {resolver.task_type or ''} "
            f'{resolver.task_id} (TF_CONFIG?), and no cluster is named. Name it, as {{"worker": ["a:1", "b:1"]}}, or '
            "leave the task out."
        )


def _require_listed(resolver: ClusterResolver) -> None:
    """Raise if this process is not one of the tasks, or if there is more than one chief."""
    tasks = resolver.cluster_spec().as_dict()
    if len(tasks.get("chief", ())) > 1:
        raise InvalidArgumentError(
            f"A cluster has one chief, which drives the others, got {tasks['chief']}. Make workers of the others."
        )
    kind, index = resolver.task_type, resolver.task_id
    if kind is None and index:
        raise InvalidArgumentError(
            f'A task has a type and an index, as {{"type": "worker", "index": {index}}}, got the index {index} alone '
            "(TF_CONFIG?). Name its type, or leave the task out."
        )
    if kind is not None and kind in tasks and (index or 0) >= len(tasks[kind]):
        raise InvalidArgumentError(
            f"A task must be one of the cluster's, but this process is task {kind} {index} (TF_CONFIG?), and of that "
            f"job there are {len(tasks[kind])}: {', '.join(tasks[kind])}. Correct the index, or the cluster."
        )


def _require_driver(resolver: ClusterResolver) -> None:
    """Raise if this process is not the first task, whose program drives all workers."""
    kind, index = resolver.task_type, resolver.task_id or 0
    first = "chief" if resolver.cluster_spec().as_dict().get("chief") else "worker"
    if kind is not None and (kind, index) != (first, 0):
        raise InvalidArgumentError(
            f"The program must run once, as task {first} 0 ({resolver.master()}), and drives all workers; this process "
            f"is task {kind} {index}. On the other machines run `ray start --address=...` and no program."
        )


def assign_hosts(hosts: Sequence[str], nodes: Sequence[Node], resolve: Callable[[str], str]) -> tuple[str, ...]:
    """Return the address of the node of each worker, whose hosts the user named.

    `resolve` returns the address of a host name, or the name itself if it is unknown.

    Raises:
        InvalidArgumentError: A host is not a node, or has more workers than nodes.

    >>> nodes = [Node("a", "10.0.0.1", {}), Node("b", "10.0.0.2", {})]
    >>> assign_hosts(["two", "10.0.0.1"], nodes, {"two": "10.0.0.2", "10.0.0.1": "10.0.0.1"}.get)
    ('10.0.0.2', '10.0.0.1')
    """
    there = Counter(node.address for node in nodes)
    assigned = tuple(resolve(host) for host in hosts)
    surplus = Counter(assigned) - there
    if surplus:
        wrong = ", ".join(
            f"{host} ({address})" if host != address else host
            for host, address in zip(hosts, assigned, strict=True)
            if address in surplus
        )
        raise InvalidArgumentError(
            f"Each worker needs a node of the Ray cluster, but the cluster resolver (TF_CONFIG?) names {len(hosts)} "
            f"workers on {', '.join(hosts)}, and the nodes are {', '.join(node.address for node in nodes)}: no node is "
            f"left for {wrong}. Run `ray start --address=...` there, or leave the workers to raydist: unset TF_CONFIG."
        )
    return assigned
