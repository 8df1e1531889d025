"""Synchronous data parallelism on many nodes: replicas on every node, every variable mirrored."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, final

from raydist.cluster.nodes import NODE_MARK, Cluster, Node, address_of, connect, living_nodes
from raydist.context.cluster_resolver import (
    ClusterResolver,
    ClusterSpec,
    SimpleClusterResolver,
    TFConfigClusterResolver,
)
from raydist.context.devices import Device, parse_device, parse_devices
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.options import CommunicationOptions, FailureOptions, Timeouts
from raydist.replicas.launch import LaunchPlan, make_setups
from raydist.replicas.step import in_sync
from raydist.strategies.synchronous import SynchronousStrategy
from raydist.strategies.worker_request import WorkerRequest, assign_hosts


def choose_workers(
    nodes: Sequence[Node], num_workers: int | None, devices_per_worker: int | Sequence[Any] | Any
) -> tuple[int, tuple[Device, ...]]:
    """Return the number of workers and the devices of each, with defaults for what the user left open.

    The default is one worker per node with GPUs, or with CPUs if no node has a GPU. All workers have as many devices as
    the smallest of their nodes; if there are more workers than nodes, workers share the devices of a node.

    Raises:
        InvalidArgumentError: A default was needed, and no node has a device; or a named GPU is on no node.

    >>> nodes = [Node("a", "10.0.0.1", {"CPU": 8, "GPU": 4}), Node("b", "10.0.0.2", {"CPU": 8, "GPU": 2})]
    >>> count, devices = choose_workers([*nodes, Node("c", "10.0.0.3", {"CPU": 64})], None, None)
    >>> count, [str(device) for device in devices]
    (2, ['GPU:0', 'GPU:1'])
    """
    most_gpus = max((node.num_gpus for node in nodes), default=0)
    if devices_per_worker is not None:
        devices = parse_devices(devices_per_worker, gpus_on_node=most_gpus)
        _require_named(devices, most_gpus)
        return num_workers or len(_with_devices(nodes, devices[0].kind)), devices
    kind = "GPU" if most_gpus else "CPU"
    counts = _with_devices(nodes, kind)
    count = num_workers or len(counts)
    workers_per_node = math.ceil(count / len(counts))
    return count, parse_devices(max(1, counts[:count][-1] // workers_per_node), gpus_on_node=most_gpus)


def _require_named(devices: Sequence[Device], most_gpus: int) -> None:
    """Raise if the number of a named GPU is on no node: Ray would give the worker another GPU.

    More devices than on any node are no error here: the cluster may grow, and Ray reports if it cannot.
    """
    last = max(devices, key=lambda device: device.index)
    if last.kind == "GPU" and len(devices) <= most_gpus <= last.index:
        raise InvalidArgumentError(
            f"The devices of a worker must be on its node, but {last} was asked for, and no node has more than "
            f"{most_gpus} GPUs: GPU:0 to GPU:{most_gpus - 1}. Name these, or give their number."
        )


def _with_devices(nodes: Sequence[Node], kind: str) -> list[int]:
    """Return the number of devices of a kind on each node with any, in descending order."""
    counts = sorted((node.num_gpus if kind == "GPU" else node.num_cpus for node in nodes), reverse=True)
    if not any(counts):
        raise InvalidArgumentError(
            f"Workers take the {kind}s of the nodes, but none of the {len(nodes)} nodes has any now. Give num_workers "
            "and devices_per_worker (a cluster that grows by itself then adds nodes), or add nodes."
        )
    return [count for count in counts if count]


def choose_placement(bundle: Mapping[str, float], num_workers: int, nodes: Sequence[Node]) -> str:
    """Return Ray's placement strategy: STRICT_SPREAD for one node per worker, SPREAD if workers must share nodes.

    Workers share nodes if too few nodes are large enough for a worker each, but all workers fit on them. If they do not
    fit, new nodes must come, one for each worker without a node.

    >>> node = Node("a", "10.0.0.1", {"CPU": 4})
    >>> [choose_placement({"CPU": 2}, count, [node]) for count in (1, 2, 3)]
    ['STRICT_SPREAD', 'SPREAD', 'STRICT_SPREAD']
    """
    room = [_times(bundle, node) for node in nodes]
    enough_nodes = sum(count > 0 for count in room) >= num_workers
    return "SPREAD" if not enough_nodes and sum(room) >= num_workers else "STRICT_SPREAD"


def _times(bundle: Mapping[str, float], node: Node) -> float:
    """Return how often a bundle fits on an empty node."""
    wanted = {name: amount for name, amount in bundle.items() if amount}
    return min((node.resources.get(name, 0) // amount for name, amount in wanted.items()), default=math.inf)


def plan_workers(
    name: str,
    num_workers: int,
    devices: Sequence[Device],
    cluster: Cluster,
    *,
    resources: Mapping[str, float] | None,
    timeouts: Timeouts,
    communication: CommunicationOptions,
    placement: str | None = None,
    addresses: Sequence[str] = (),
) -> LaunchPlan:
    """Plan `num_workers` workers with one replica per device; the replicas of a worker are on one node.

    `resources` are Ray's for one replica, `placement` is Ray's placement strategy (None: see `choose_placement`), and
    `addresses` are those of the workers' nodes, empty for any nodes.
    """
    kind = devices[0].kind
    wanted = dict(resources) if resources else cluster.replica_resources(kind)
    bundle = {resource: amount * len(devices) for resource, amount in wanted.items()}
    return LaunchPlan(
        setups=make_setups(
            name,
            tuple(_title(worker, device) for worker in range(num_workers) for device in devices),
            kind=kind,
            per_worker=len(devices),
            num_threads=1,  # `settle` replaces this once the nodes are known
            timeouts=timeouts,
            communication=communication,
        ),
        bundles=tuple({**bundle, f"node:{address}": NODE_MARK} for address in addresses) or (bundle,) * num_workers,
        placement=placement or choose_placement(bundle, num_workers, cluster.nodes),
        resources=wanted,
        store_host=cluster.store_host(),
        node_id=next((node for node in cluster.nodes if _times(bundle, node) >= 1), cluster.nodes[0]).node_id,
        num_workers=num_workers,
    )


def _title(worker: int, device: Device) -> str:
    """Return TensorFlow's name of a worker's device."""
    return f"/job:worker/replica:0/task:{worker}/device:{device}"


_log = logging.getLogger("raydist")


class WorkersStrategy(SynchronousStrategy):
    """Base class of strategies with replica actors on the nodes of a Ray cluster; names begin with `kind`."""

    def __init__(
        self,
        kind: str,
        num_workers: int | None,
        devices_per_worker: int | Sequence[Any] | Any,
        communication_options: CommunicationOptions | None,
        cluster_resolver: ClusterResolver | Any,
        *,
        timeouts: Timeouts | None,
        resources_per_replica: Mapping[str, float] | None,
        failure_options: FailureOptions | None,
    ) -> None:
        if num_workers is not None and (isinstance(num_workers, bool) or num_workers < 1):
            raise InvalidArgumentError(f"num_workers must be None (one a node) or >= 1, got {num_workers!r}.")
        if devices_per_worker is not None:
            parse_devices(devices_per_worker, gpus_on_node=0)  # bad names fail here, before anything is started
        super().__init__(kind, timeouts, communication_options, failure_options)
        self._request = WorkerRequest(num_workers, devices_per_worker, resources_per_replica)
        self._resolver = TFConfigClusterResolver() if cluster_resolver is None else cluster_resolver
        if isinstance(self._resolver, ClusterResolver):
            self._request = self._request.with_resolver(self._resolver)
        else:
            self._request = self._request.with_scaling_config(self._resolver)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        return in_sync(self._plan().setups[0]).worker_devices

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver that names the workers; without one, a resolver that returns the nodes of the workers.

        Without a resolver, blocks until the replicas are placed (limit: `Timeouts.start_s`).

        Source: tf.distribute.Strategy.cluster_resolver.

        >>> resolver = rd.SimpleClusterResolver(rd.ClusterSpec({"worker": ["10.0.0.1", "10.0.0.2"]}))
        >>> rd.MultiWorkerMirroredStrategy(cluster_resolver=resolver).cluster_resolver.master()
        '10.0.0.1'
        """
        if isinstance(self._resolver, ClusterResolver) and self._resolver.cluster_spec():
            return self._resolver
        group, plan = self._launch(), self._plan()
        hosts = dict(zip((setup.worker for setup in plan.setups), group.hosts, strict=True))
        addresses = {node.node_id: node.address for node in living_nodes()}
        return SimpleClusterResolver(
            ClusterSpec({"worker": [addresses.get(host, host) for host in hosts.values()]}), "worker", 0
        )

    def _make_plan(self) -> LaunchPlan:
        cluster, request = connect(), self._request
        count, devices = choose_workers(cluster.nodes, request.num_workers, request.devices)
        return self._plan_workers(count, devices, cluster)

    def _plan_for(self, num_replicas: int) -> LaunchPlan:
        if self._request.hosts:
            raise FailedPreconditionError(
                f"The cluster resolver (TF_CONFIG?) names {len(self._request.hosts)} workers, so their number cannot "
                "change. Leave the choice of nodes to Ray."
            )
        plan = self._plan()
        per_worker = len(plan.setups) // plan.num_workers
        num_workers, rest = divmod(num_replicas, per_worker)
        if rest:
            raise InvalidArgumentError(
                f"Each worker has {per_worker} replicas, so their number must be a multiple of {per_worker}, got "
                f"{num_replicas}."
            )
        names = plan.setups[0].worker_devices[:per_worker]
        devices = tuple(parse_device(name.rpartition("device:")[2]) for name in names)
        return self._plan_workers(num_workers, devices, connect())

    def _plan_workers(self, count: int, devices: Sequence[Device], cluster: Cluster) -> LaunchPlan:
        request = self._request
        plan = plan_workers(
            self._name,
            count,
            devices,
            cluster,
            resources=request.resources,
            timeouts=self._timeouts,
            communication=self._communication,
            placement=request.placement,
            addresses=assign_hosts(request.hosts, cluster.nodes, address_of),
        )
        if plan.placement == "SPREAD" and request.placement is None:
            _log.warning("%d workers share nodes: fewer nodes than workers are large enough for one.", count)
        return plan


@final
class MultiWorkerMirroredStrategy(WorkersStrategy):
    """Replica actors on the nodes of a Ray cluster, in lock step.

    A worker is the group of replicas on one node. One program drives all workers: unlike in TensorFlow it runs once,
    and the other nodes only need `ray start --address=...`. Every replica holds a copy of each variable of the scope;
    gradients are all-reduced while backward still runs. Replicas are numbered worker by worker and start when the scope
    is first entered; the constructor does not block.

    Args:
        num_workers: Number of workers. Default: one for each node with GPUs, or with CPUs if no node has a GPU. If
            there are more workers than nodes, workers share nodes.
        devices_per_worker: A count or names, as for MirroredStrategy. Default: all GPUs of a node, else one replica per
            CPU core; if the nodes differ, the number of the smallest node.
        communication_options: Options for the exchange of gradients and values.
        failure_options: What happens when a replica is lost; see `MirroredStrategy`.
        cluster_resolver: Names the workers' machines, which must be nodes of the Ray cluster; or a
            `ray.train.ScalingConfig`, whose workers are replicas here. Default: the environment variable TF_CONFIG if
            it is set, else all nodes of the Ray cluster.
        timeouts: The limit of every wait, in seconds.
        resources_per_replica: Ray resources of one replica, e.g. {"CPU": 2}. Default: a GPU each on GPUs, 1 CPU each on
            CPUs. The replicas of a worker are reserved together, on one node.

    Raises:
        InvalidArgumentError: Fewer than one worker, an unknown device, two kinds at once, none, or the same twice; a
            resolver that contradicts `num_workers`, or for which this process is not the first worker; (when the
            replicas are first needed) a resolver with machines that are not nodes of the Ray cluster.
        DeadlineExceededError: (at the scope) the cluster can't place the workers within `timeouts.start_s`.

    Source: tf.distribute.MultiWorkerMirroredStrategy.

    >>> strategy = MultiWorkerMirroredStrategy(num_workers=2, devices_per_worker=1)  # nothing is started yet
    >>> strategy.close()

    Example::

        ray.init(address="auto")  # or RAY_ADDRESS=..., or `ray job submit`
        with rd.MultiWorkerMirroredStrategy() as strategy:
            with strategy.scope():
                model = Net()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for batch in strategy.distribute_dataset(dataset.batch(64)):
                loss = strategy.run(train_step, args=(batch,))
    """

    def __init__(
        self,
        num_workers: int | None = None,
        devices_per_worker: int | Sequence[Any] | Any = None,
        communication_options: CommunicationOptions | None = None,
        cluster_resolver: ClusterResolver | Any = None,
        *,
        timeouts: Timeouts | None = None,
        resources_per_replica: Mapping[str, float] | None = None,
        failure_options: FailureOptions | None = None,
    ) -> None:
        super().__init__(
            "multi-worker",
            num_workers,
            devices_per_worker,
            communication_options,
            cluster_resolver,
            timeouts=timeouts,
            resources_per_replica=resources_per_replica,
            failure_options=failure_options,
        )
