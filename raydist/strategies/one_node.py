"""Strategies on the devices of one node."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from raydist.cluster.nodes import Cluster, Node, connect, connected
from raydist.cluster.placement import may_grow
from raydist.context.devices import Device, parse_device, parse_devices
from raydist.core.errors import InvalidArgumentError
from raydist.options import CommunicationOptions, FailureOptions, Timeouts
from raydist.replicas.central_variables import CentralVariables
from raydist.replicas.launch import LaunchPlan, plan_one_node, warn_if_crowded
from raydist.replicas.rules import StrategyHooks
from raydist.strategies.cross_device_ops import CrossDeviceOps, accumulation_of, options_of
from raydist.strategies.synchronous import SynchronousStrategy


def choose_devices(
    wanted: int | Sequence[Any] | Any, cluster: Cluster, *, may_grow: Callable[[], bool]
) -> tuple[Node, tuple[Device, ...]]:
    """Return the node and the devices of a strategy on one node.

    By default (None) these are all GPUs of the node with most of them, else its cores. `may_grow` returns True if an
    autoscaler may add GPUs; the placement of the replicas then waits for them.

    Raises:
        InvalidArgumentError: `wanted` names no devices, or GPUs that no present or future node has.

    >>> from raydist.cluster.nodes import Node
    >>> cluster = Cluster(False, (Node("a", "10.0.0.1", {"CPU": 8.0, "GPU": 2.0}),))
    >>> [str(device) for device in choose_devices(None, cluster, may_grow=bool)[1]]
    ['GPU:0', 'GPU:1']
    """
    node = cluster.best_node()
    devices = parse_devices(
        node.num_gpus or node.num_cpus or 1 if wanted is None else wanted, gpus_on_node=node.num_gpus
    )
    needed = max(device.index for device in devices) + 1
    if devices[0].kind == "GPU" and needed > node.num_gpus and not may_grow():
        asked = f"{len(devices)} GPUs" if isinstance(wanted, int) else ", ".join(map(str, devices))
        there = "; ".join(f"node {each.address}: {each.num_cpus} CPU, {each.num_gpus} GPU" for each in cluster.nodes)
        raise InvalidArgumentError(
            f"All devices must be there, on one node, but {asked} {'was' if len(devices) == 1 else 'were'} asked for. "
            f"There is: {there}. {_advice(node)}"
        )
    return node, devices


def _advice(node: Node) -> str:
    if not node.num_gpus:
        return 'Name CPUs ("CPU:0", "CPU:1", or a count), or add a node with GPUs (ray start --num-gpus).'
    names = ", ".join(f"GPU:{index}" for index in range(node.num_gpus))
    return f"Leave devices out to take {names}, or name fewer."


class OneNodeStrategy(SynchronousStrategy):
    """Base class of strategies with one replica actor per device of one node, in lock step; derive your own from it.

    The rules that :meth:`replica_rules` returns decide about everything besides running steps: keep gradients local,
    act after each batch, or carry out `optimizer.step()` in another way. `raydist.testing.check_strategy` tests a
    strategy against the contract.

    Args:
        devices: A count, or names: "cpu", "CPU:1", "GPU:0", "cuda:1", torch.device. Default: all GPUs of the node
            with most of them, else one replica per CPU core.
        communication_options: Options for the exchange of gradients and values.
        timeouts: The limit of every wait, in seconds.
        resources_per_replica: Ray resources of one replica; see `MirroredStrategy`.
        failure_options: What happens when a replica is lost; see `MirroredStrategy`.

    Raises:
        InvalidArgumentError: An unknown device, two kinds at once, none, or the same twice; a GPU that no node has
            (raised here if this process is connected to a cluster, else when the cluster is first needed).

    Source: tf.distribute.Strategy with a custom tf.distribute.StrategyExtended.

    Example::

        class LocalSGD(rd.OneNodeStrategy):
            def replica_rules(self):
                return AverageEvery(4)  # see rd.StrategyHooks
    """

    def __init__(
        self,
        devices: int | Sequence[Any] | Any = None,
        *,
        communication_options: CommunicationOptions | None = None,
        timeouts: Timeouts | None = None,
        resources_per_replica: Mapping[str, float] | None = None,
        failure_options: FailureOptions | None = None,
    ) -> None:
        if devices is not None:
            parse_devices(devices, gpus_on_node=0)  # invalid names fail here, before anything is started
            cluster = connected()
            if cluster is not None:
                choose_devices(devices, cluster, may_grow=_may_grow(cluster))
        super().__init__(type(self).__name__, timeouts, communication_options, failure_options)
        self._wanted = devices
        self._resources = resources_per_replica

    @abstractmethod
    def replica_rules(self) -> StrategyHooks:
        """Return the rules of the replicas: `rd.StrategyHooks()` only exchanges gradients.

        Returns:
            The rules, which are copied to each replica. Called once, when the replicas are planned, or by tests.

        >>> rd.MirroredStrategy("cpu").replica_rules().exchanges_gradients
        True
        """

    @property
    def worker_devices(self) -> tuple[str, ...]:
        return self._plan().setups[0].worker_devices

    @final
    def _make_plan(self) -> LaunchPlan:
        return self._plan_devices(self._wanted)

    @final
    def _plan_for(self, num_replicas: int) -> LaunchPlan:
        kind = self.worker_devices[0].partition(":")[0]
        return self._plan_devices([f"{kind}:{number}" for number in range(num_replicas)])

    def _plan_devices(self, wanted: int | Sequence[Any] | Any) -> LaunchPlan:
        cluster = connect()
        node, devices = choose_devices(wanted, cluster, may_grow=_may_grow(cluster))
        if devices[0].kind == "CPU" and cluster.started_here:
            warn_if_crowded(len(devices), node)
        return plan_one_node(
            self._name,
            devices,
            cluster,
            node,
            resources=self._resources,
            timeouts=self._timeouts,
            communication=self._communication,
        )


def _may_grow(cluster: Cluster) -> Callable[[], bool]:
    return lambda: not cluster.started_here and may_grow()


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
        failure_options: What happens when a replica or the input pipeline is lost. Default: on CPUs it is replaced.

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
        failure_options: FailureOptions | None = None,
    ) -> None:
        super().__init__(
            devices,
            communication_options=options_of(cross_device_ops, communication_options),
            timeouts=timeouts,
            resources_per_replica=resources_per_replica,
            failure_options=failure_options,
        )
        self._cross_device_ops = cross_device_ops

    def replica_rules(self) -> StrategyHooks:
        return StrategyHooks()

    def _plan_devices(self, wanted: int | Sequence[Any] | Any) -> LaunchPlan:
        plan = super()._plan_devices(wanted)
        devices = [parse_device(name) for name in plan.setups[0].worker_devices]
        accumulation = accumulation_of(self._cross_device_ops, devices)
        return replace(plan, setups=tuple(replace(setup, accumulation=accumulation) for setup in plan.setups))


@final
class CentralStorageStrategy(OneNodeStrategy):
    """One replica actor per device of one node, in lock step, and one state of the optimizers, in the node's memory.

    Replicas compute with copies of the parameters. Gradients are all-reduced, and the first replica runs
    `optimizer.step()` once, on the CPU, while the others wait; then it sends the parameters to the others. Results are
    those of `MirroredStrategy`. A step that reads `optimizer.state` finds it on the first replica only, except for
    optimizers that are given a closure: every replica steps these.

    It takes less memory than `MirroredStrategy`: the state of Adam is twice the size of the parameters. All replicas
    together do less work in `optimizer.step()`; on GPUs an update costs a copy to the host and back. The GPU path was
    tested with copies on the CPU only.

    Args:
        devices: A count, or names: "cpu", "CPU:1", "GPU:0", "cuda:1", torch.device. Default: all GPUs of the node
            with most of them, else one replica per CPU core.
        communication_options: Options for the exchange of gradients and values.
        timeouts: The limit of every wait, in seconds.
        resources_per_replica: Ray resources of one replica; see `MirroredStrategy`.
        failure_options: What happens when a replica is lost; see `MirroredStrategy`.

    Raises:
        InvalidArgumentError: An unknown device, two kinds at once, none, or the same twice; a GPU that no node has.
        DeadlineExceededError: (at the scope) the cluster can't place the replicas within `timeouts.start_s`.
        CollectiveMismatchError: (at a step) replicas step different optimizers.

    Source: tf.distribute.experimental.CentralStorageStrategy.

    >>> strategy = CentralStorageStrategy(["CPU:0", "CPU:1"])  # nothing is started yet
    >>> strategy.close()
    """

    def replica_rules(self) -> StrategyHooks:
        return CentralVariables()
