"""Synchronous data parallelism on one node: one replica actor per device, every variable mirrored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from raydist.cluster import connect
from raydist.context.devices import Device, parse_devices
from raydist.errors import InvalidArgumentError
from raydist.options import Timeouts
from raydist.replicas.launch import LaunchPlan, plan_one_node, warn_if_crowded
from raydist.strategies.synchronous import SynchronousStrategy

__all__ = ["MirroredStrategy"]


@final
class MirroredStrategy(SynchronousStrategy):
    """One replica actor per device of one node, in lock step.

    Every replica holds a copy of each variable of the scope; gradients meet in an all-reduce while backward still runs.
    Ray is started on this machine if none runs, else joined. Replicas start when the scope is first entered. Making the
    strategy waits for nothing.

    Args:
        devices: A count, or names: "cpu", "CPU:1", "GPU:0", "cuda:1", torch.device. Default: all GPUs of the node
            with most of them, else one replica per CPU core.
        cross_device_ops: None: shared memory or gloo between CPUs, NCCL between GPUs. There is no other choice.
        timeouts: The limit of every wait, in seconds.
        resources_per_replica: Ray resources of one replica, e.g. {"CPU": 2}. Default: a GPU each on GPUs; on CPUs 1
            CPU each on a cluster that runs already, and a share of the cores on a Ray started here, so that any count
            fits.

    Raises:
        InvalidArgumentError: An unknown device, two kinds at once, none, or the same twice.
        DeadlineExceededError: (at the scope) the cluster can't place the replicas within `timeouts.start_s`.

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
        cross_device_ops: None = None,
        *,
        timeouts: Timeouts | None = None,
        resources_per_replica: Mapping[str, float] | None = None,
    ) -> None:
        if cross_device_ops is not None:
            raise InvalidArgumentError(
                f"cross_device_ops must be None (shared memory or gloo between CPUs, NCCL between GPUs), "
                f"got {cross_device_ops!r}. Leave it out."
            )
        if devices is not None:
            parse_devices(devices, gpus_on_node=0)  # bad names fail here, before anything is started
        super().__init__("mirrored", timeouts)
        self._wanted = devices
        self._resources = resources_per_replica
        self._devices: tuple[Device, ...] = ()

    @property
    def worker_devices(self) -> tuple[str, ...]:
        self._plan()
        return tuple(map(str, self._devices))

    def _make_plan(self) -> LaunchPlan:
        cluster = connect()
        node = cluster.best_node()
        wanted = self._wanted if self._wanted is not None else (node.num_gpus or node.num_cpus)
        self._devices = parse_devices(wanted, gpus_on_node=node.num_gpus)
        if self._devices[0].kind == "CPU" and cluster.started_here:
            warn_if_crowded(len(self._devices), node)
        return plan_one_node(
            self._name, self._devices, cluster, node, resources=self._resources, timeouts=self._timeouts
        )
