"""Synchronous data parallelism on a TPU slice: one actor on each host, every variable mirrored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

from raydist.cluster.nodes import connect
from raydist.context.cluster_resolver import ClusterResolver
from raydist.core.errors import InvalidArgumentError
from raydist.options import FailureOptions, Timeouts
from raydist.replicas.launch import LaunchPlan, plan_slice
from raydist.strategies.synchronous import SynchronousStrategy
from raydist.tpu_slices.inventory import SliceShape, check_names, choose_shape
from raydist.tpu_slices.reservation import cluster_adds_tpus, tpu_hosts


@final
@dataclass(frozen=True, slots=True)
class TpuRequest:
    """The user's request for a slice; None means left open.

    Attributes:
        topology: Topology of the slice, in Ray's notation.
        version: Version of the chips, in Ray's notation.
        num_hosts: Number of hosts of the slice.
        chips: Number of chips on each host.
    """

    topology: str | None = None
    version: str | None = None
    num_hosts: int | None = None
    chips: int | None = None

    @staticmethod
    def of(topology: str | None, accelerator_version: str | None, cluster_resolver: Any) -> TpuRequest:
        """Combine the arguments of the strategy.

        Raises:
            InvalidArgumentError: An argument names nothing that exists, or two contradict each other.

        >>> TpuRequest.of("2x2x2", "TPU-V4", None)
        TpuRequest(topology='2x2x2', version='v4', num_hosts=None, chips=None)
        """
        request = TpuRequest(*check_names(topology, accelerator_version))
        if cluster_resolver is None:
            return request
        if isinstance(cluster_resolver, ClusterResolver):
            return request._with_resolver(cluster_resolver)
        return request._with_scaling_config(cluster_resolver)

    def _with_resolver(self, resolver: ClusterResolver) -> TpuRequest:
        spec = resolver.cluster_spec()
        hosts = sum(len(spec.as_dict().get(job, ())) for job in ("chief", "worker"))
        return replace(self, num_hosts=hosts or None, chips=resolver.num_accelerators().get("TPU"))

    def _with_scaling_config(self, config: Any) -> TpuRequest:
        if not getattr(config, "use_tpu", False):
            raise InvalidArgumentError(
                "cluster_resolver must be an rd.ClusterResolver, or a ray.train.ScalingConfig with use_tpu=True, got "
                f"{config!r:.300}."
            )
        topology, version = check_names(getattr(config, "topology", None), getattr(config, "accelerator_type", None))
        for mine, theirs, name in ((self.topology, topology, "topology"), (self.version, version, "version")):
            if None not in (mine, theirs) and mine != theirs:
                raise InvalidArgumentError(
                    f"The {name} of the slice is {mine!r}, but the ScalingConfig says {theirs!r}. Leave one out."
                )
        count = getattr(config, "num_workers", None)
        return replace(
            self,
            topology=self.topology or topology,
            version=self.version or version,
            num_hosts=count if isinstance(count, int) else None,  # or (least, most), which is not used
        )

    def require(self, shape: SliceShape) -> SliceShape:
        """Return the slice that was found, if it matches the request.

        Raises:
            InvalidArgumentError: The resolver contradicts the slice.
        """
        for name, said, found in (
            ("hosts", self.num_hosts, shape.num_hosts),
            ("chips on each host", self.chips, shape.chips_per_host),
        ):
            if said not in (None, found):
                raise InvalidArgumentError(
                    f"The cluster resolver says {said} {name}, but a {shape} has {found}. Name the hosts of one slice, "
                    "or leave cluster_resolver out."
                )
        return shape


@final
class TPUStrategy(SynchronousStrategy):
    """One actor on each host of a TPU slice, with one replica for each of the host's chips, in lock step.

    Ray's slice placement groups reserve the whole slice when the scope is first entered; the constructor does not
    block. A host's actor drives all of its chips, with a thread for each, as `torch_xla` does in one process (chips of
    v2, v3 and v7x are two devices each: two replicas). Steps are plain PyTorch on the lazy tensors of `torch_xla`:
    operations are queued, and run together at the end of the step and when a value is read. XLA's cross-replica sum
    reduces the gradients after the backward pass, in separate programs, which are the same on all chips for any number
    of rows. XLA compiles a step anew for each new number of rows: let global batches be a multiple of the number of
    replicas, and prefer `drop_remainder` if compiling takes long. Draw random numbers on the chip: the replicas of a
    host share the generator of its CPU.

    Needs `torch_xla` on the hosts, and on all machines the torch version that it is built for (2.9 for torch_xla 2.9):
    `pip install 'torch~=2.9.0' 'torch_xla[tpu]~=2.9.0' -f https://storage.googleapis.com/libtpu-releases/index.html`.

    Nothing of this has run on a TPU. The reservation of slices is tested on nodes that only claim to be TPU hosts;
    training and collectives by torch_xla 2.9 itself on XLA's CPU device, with up to four devices in one process;
    several hosts with a fake torch_xla that exchanges files. libtpu, its discovery of hosts, the links between chips,
    `torch.compile` on chips, and every speed are untested. torch_xla has no sparse tensors: embeddings must be dense. A
    strategy uses one whole slice: no part of one, and not several. The loss of a host ends the
    strategy.

    Args:
        topology: "2x2x2", "4x4", ... Default: the topology of the cluster's TPU hosts, if they are of one kind.
        accelerator_version: "v4", "v5litepod", "v5p", "v6e", ... Default: as for `topology`.
        cluster_resolver: An rd.ClusterResolver or a ray.train.ScalingConfig (`use_tpu=True`) whose number of hosts,
            chips, topology and version must be the slice's.
        timeouts: The limit of every wait, in seconds. `start_s` covers the wait for a slice, and libtpu's start;
            `collective_s` must be longer than it takes to compile a step.
        failure_options: What happens when the process of a host is lost. By default it is an error; with
            `recover=True` all processes start again and continue from a copy of their state.

    Raises:
        InvalidArgumentError: Nothing has that topology or version, the resolver contradicts them; later: the cluster
            has no such TPUs.
        DeadlineExceededError: (at the scope) no such slice was free within `timeouts.start_s`.
        FailedPreconditionError: (at the scope) hosts of the slice are not nodes of the cluster; (at the first step) a
            host lacks `torch_xla`.

    Source: tf.distribute.TPUStrategy.

    >>> strategy = TPUStrategy("2x2x2", "v4")  # nothing is started yet
    >>> strategy.close()

    Example::

        ray.init(address="auto")  # on the slice's hosts: ray start
        with rd.TPUStrategy("2x2x2", "v4") as strategy:
            with strategy.scope():
                model = Net()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for batch in strategy.distribute_dataset(dataset.batch(64, drop_remainder=True)):
                loss = strategy.run(train_step, args=(batch,))
    """

    def __init__(
        self,
        topology: str | None = None,
        accelerator_version: str | None = None,
        cluster_resolver: ClusterResolver | Any = None,
        *,
        timeouts: Timeouts | None = None,
        failure_options: FailureOptions | None = None,
    ) -> None:
        self._request = TpuRequest.of(topology, accelerator_version, cluster_resolver)
        super().__init__("tpu", timeouts, failure_options=failure_options)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        return self._plan().setups[0].worker_devices

    def _make_plan(self) -> LaunchPlan:
        cluster, request = connect(), self._request
        shape = choose_shape(tpu_hosts(), request.topology, request.version, may_grow=cluster_adds_tpus())
        return plan_slice(
            self._name,
            request.require(shape),
            cluster,
            timeouts=self._timeouts,
            communication=self._communication,
        )
