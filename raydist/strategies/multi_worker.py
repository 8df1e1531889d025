"""Synchronous data parallelism on many nodes: replicas on every node, every variable mirrored."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, final

from raydist.cluster import address_of, connect, living_nodes
from raydist.context.cluster_resolver import ClusterResolver, SimpleClusterResolver, TFConfigClusterResolver
from raydist.context.cluster_spec import ClusterSpec
from raydist.context.devices import parse_devices
from raydist.errors import InvalidArgumentError
from raydist.options import CommunicationOptions, Timeouts
from raydist.replicas.launch import LaunchPlan
from raydist.replicas.workers import choose_workers, plan_workers
from raydist.strategies.synchronous import SynchronousStrategy
from raydist.strategies.worker_request import WorkerRequest, assign_hosts

__all__ = ["MultiWorkerMirroredStrategy"]

_log = logging.getLogger("raydist")


@final
class MultiWorkerMirroredStrategy(SynchronousStrategy):
    """Replica actors on the nodes of a Ray cluster, in lock step.

    A worker is one node's share of the replicas. One program drives them all: unlike in TensorFlow it runs once, and
    the other nodes only need `ray start --address=...`. Every replica holds a copy of each variable of the scope;
    gradients meet in an all-reduce while backward still runs. Replicas are numbered worker by worker and start when the
    scope is first entered. Making the strategy waits for nothing.

    Args:
        num_workers: How many. Default: one for each node with GPUs, or with CPUs where no node has a GPU. More workers
            than nodes share nodes.
        devices_per_worker: A count or names, as for MirroredStrategy. Default: all GPUs of a node, else one replica per
            CPU core; of the smallest node of those taken where they differ.
        communication_options: How the replicas exchange gradients and values.
        cluster_resolver: Names the workers' machines, which must be nodes of the Ray cluster; or a
            `ray.train.ScalingConfig`, whose workers are replicas here. Default: the environment variable TF_CONFIG,
            where it is set, else all nodes of the Ray cluster.
        timeouts: The limit of every wait, in seconds.
        resources_per_replica: Ray resources of one replica, e.g. {"CPU": 2}. Default: a GPU each on GPUs, 1 CPU each on
            CPUs. The replicas of a worker are reserved together, on one node.

    Raises:
        InvalidArgumentError: Fewer than one worker, an unknown device, two kinds at once, none, or the same twice; a
            resolver that says something else than `num_workers`, or that this process is not the first worker; (when
            replicas are first asked for) a resolver whose machines are no nodes of the Ray cluster.
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
    ) -> None:
        if num_workers is not None and (isinstance(num_workers, bool) or num_workers < 1):
            raise InvalidArgumentError(f"num_workers must be None (one a node) or >= 1, got {num_workers!r}.")
        if devices_per_worker is not None:
            parse_devices(devices_per_worker, gpus_on_node=0)  # bad names fail here, before anything is started
        super().__init__("multi-worker", timeouts, communication_options)
        self._request = WorkerRequest(num_workers, devices_per_worker, resources_per_replica)
        self._resolver = TFConfigClusterResolver() if cluster_resolver is None else cluster_resolver
        if isinstance(self._resolver, ClusterResolver):
            self._request = self._request.with_resolver(self._resolver)
        else:
            self._request = self._request.with_scaling_config(self._resolver)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        return self._plan().setups[0].worker_devices

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver that names the workers; where none was given, one that tells on which nodes they are.

        Blocks in that case until the replicas are placed (limit: `Timeouts.start_s`).

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
