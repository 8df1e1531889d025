"""Synchronous data parallelism on one node: one replica actor per device, every variable mirrored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from raydist.options import CommunicationOptions, Timeouts
from raydist.replicas.launch import LaunchPlan
from raydist.replicas.rules import ReplicaRules
from raydist.strategies.cross_device_ops import CrossDeviceOps, accumulation_of, options_of
from raydist.strategies.one_node import OneNodeStrategy

__all__ = ["MirroredStrategy"]


@final
class MirroredStrategy(OneNodeStrategy):
    """One replica actor per device of one node, in lock step.

    Every replica holds a copy of each variable of the scope; gradients are all-reduced while backward still runs. Ray
    is started on this machine if none runs, else joined. Replicas start when the scope is first entered; the
    constructor does not block. Ray decides which GPU of its node a replica gets: names give the number of GPUs.

    Args:
        devices: A count, or names: "cpu", "CPU:1", "GPU:0", "cuda:1", torch.device. Default: all GPUs of the node
            with most of them, else one replica per CPU core.
        cross_device_ops: The reduction between replicas: rd.NcclAllReduce(), rd.HierarchicalCopyAllReduce(),
            rd.ReductionToOneDevice(). None: shared memory or gloo between CPUs, NCCL between GPUs.
        communication_options: Further options for the exchange of gradients and values.
        timeouts: The limit of every wait, in seconds.
        resources_per_replica: Ray resources of one replica, e.g. {"CPU": 2}. Default: a GPU each on GPUs; on CPUs 1 CPU
            each on a running cluster, and a share of the cores on a Ray that raydist started, so that any count fits.

    Raises:
        InvalidArgumentError: cross_device_ops and communication_options ask for different implementations; an unknown
            device, two kinds at once, none, or the same twice; a GPU that no node has (raised here if this process is
            connected to a cluster, else when the cluster is first needed).
        DeadlineExceededError: (at the scope, or at the first step if other strategies of this process hold the
            resources) the cluster can't place the replicas within `timeouts.start_s`.

    Source: tf.distribute.MirroredStrategy.

    >>> strategy = MirroredStrategy(["CPU:0", "CPU:1"])  # nothing is started yet
    >>> strategy.close()

    Example::

        with rd.MirroredStrategy(2) as strategy:
            with strategy.scope():
                model = Net()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for batch in strategy.distribute_dataset(dataset.batch(64)):
                loss = strategy.run(train_step, args=(batch,))
    """

    def __init__(
        self,
        devices: int | Sequence[Any] | Any = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
        timeouts: Timeouts | None = None,
        resources_per_replica: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(
            devices,
            communication_options=options_of(cross_device_ops, communication_options),
            timeouts=timeouts,
            resources_per_replica=resources_per_replica,
        )
        self._cross_device_ops = cross_device_ops

    def replica_rules(self) -> ReplicaRules:
        return ReplicaRules()

    def _make_plan(self) -> LaunchPlan:
        plan = super()._make_plan()
        accumulation = accumulation_of(self._cross_device_ops, self._devices)
        return replace(plan, setups=tuple(replace(setup, accumulation=accumulation) for setup in plan.setups))
