"""Asynchronous training: workers that take batches when they are free, and variables on parameter servers."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, TypeVarTuple, final

import torch

from raydist.checkpoints.restore import ShardRestorer
from raydist.checkpoints.shards import DispatchedSave
from raydist.cluster.nodes import address_of, connect, waits_for_own
from raydist.cluster.preemption import add_step_queue
from raydist.context.cluster_resolver import ClusterResolver, TFConfigClusterResolver
from raydist.context.current import StepCounter
from raydist.context.run_call import plain_call, require_call
from raydist.context.strategy_values import StrategyStats, ValueContext
from raydist.coordinator.checkpointing import PS_RESTORES, PS_SAVES, PsRestorer, PsSaver, ps_save_state
from raydist.coordinator.closures import Closure
from raydist.coordinator.coordinator import Coordinator, WorkersLink
from raydist.coordinator.launch import Launched, PsPlan, PsRequest, launch_ps, plan_ps
from raydist.coordinator.per_worker import PerWorkerInput
from raydist.coordinator.remote_value import RemoteValue, fetched
from raydist.coordinator.server_recovery import ServerRecovery
from raydist.core.errors import InvalidArgumentError
from raydist.core.exception_utils import folded
from raydist.distributed_dataset import InputSide, ReplicaCount
from raydist.mirroring.driver import MirrorDriver
from raydist.options import FailureOptions, RunOptions, Timeouts
from raydist.parameter_servers.consistency import Consistency, require_consistency
from raydist.parameter_servers.slices import VariablePartitioner
from raydist.replicas.runner import ReplicaRunner
from raydist.replicas.step_summaries import counting
from raydist.strategies.closure_scheduler import ClosureScheduler
from raydist.strategies.hosted import HostedStrategy, release_mirrored
from raydist.strategies.worker_request import assign_hosts

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


@final
class PsCluster:
    """The workers and servers of one strategy. For use by one thread.

    `name` is unique, `title` is for messages; `settings` are arguments of `Launched.start`. Once workers and servers
    are started, `close_when_dropped` is called with a function that ends the processes, then `on_start`.

    Attributes:
        launched: Workers and servers; None until they are started.
    """

    def __init__(
        self,
        name: str,
        title: str,
        request: PsRequest,
        timeouts: Timeouts,
        settings: Mapping[str, Any],
        *,
        close_when_dropped: Callable[[Callable[[], None]], None],
        on_start: Callable[[Launched], None],
    ) -> None:
        self.launched: Launched | None = None
        self._name = name
        self._title = title
        self._request = request
        self._settings = settings
        self._timeouts = timeouts
        self._close_when_dropped = close_when_dropped
        self._on_start = on_start
        self._ps_plan: PsPlan | None = None

    @property
    def num_workers(self) -> int:
        """Number of workers. If it was left open, the property may start or join Ray."""
        return self._request.num_workers or len(self.plan().setups)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """One device name for each worker."""
        return tuple(setup.worker_devices[0] for setup in self.plan().setups)

    def device_types(self) -> set[str]:
        """Return the device types of the workers."""
        return {torch.device(setup.device).type for setup in self.plan().setups}

    def nodes(self) -> tuple[str, ...]:
        """Return the nodes of workers and servers, as far as they are placed."""
        return () if self.launched is None else (*self.launched.worker_hosts, *self.launched.server_hosts)

    def plan(self) -> PsPlan:
        """Plan workers and servers. May start or join Ray (limit: `Timeouts.start_s`)."""
        if self._ps_plan is None:
            cluster = connect()
            find = functools.partial(assign_hosts, nodes=cluster.nodes, resolve=address_of)
            self._ps_plan = plan_ps(
                self._name,
                self._request,
                cluster,
                self._timeouts,
                worker_addresses=find(self._request.worker_hosts),
                server_addresses=find(self._request.server_hosts),
            )
        return self._ps_plan

    def launch_early(self) -> None:
        """Launch, unless older strategies hold the resources: the program may be about to drop one of them."""
        if self.launched is None and not waits_for_own(self.plan().bundles, "SPREAD"):
            self.launch()

    def launch(self) -> Launched:
        """Start workers and servers if necessary, without waiting for workers: the driver builds its model then."""
        if self.launched is None:
            launched = launch_ps(self.plan(), self._timeouts, self._title)
            self._close_when_dropped(launched.close)
            try:
                memory = int(self.plan().server_resources.get("memory", 0)) or None
                launched.start(self._timeouts, server_memory=memory, **self._settings)
            except BaseException:
                launched.close()
                raise
            add_step_queue(launched.coordinator)
            self.launched = launched
            self._on_start(launched)
        return self.launched


@final
class ParameterServerStrategy(HostedStrategy):
    """Worker actors that each train on batches of their own, at their own pace, and variables on parameter servers.

    `run` gives the whole global batch to the next free worker and returns a :class:`RemoteValue` at once;
    `rd.ClusterCoordinator(strategy)` schedules, joins and fetches as in TensorFlow. A worker pulls the parameters when
    a closure begins. `optimizer.step()` pushes the present `.grad`; the servers carry out the step, and the worker goes
    on with the updated parameters. No worker waits for slower ones, unless `consistency` requires it. Reading variables
    on the driver waits for all scheduled closures.

    When a worker dies, others run its closures, and each update is applied once; meanwhile the worker is restarted. A
    batch that was an argument is the same batch then. When a server dies, all servers and workers start again with the
    values of the last checkpoint, if an `rd.CheckpointManager` that saves all variables and optimizers is watching;
    otherwise the loss is an `UnavailableError`, and training must restart from a checkpoint.

    Learning rates and training flags that the driver changes reach each worker before closures that are scheduled
    later. A step's writes to plain attributes, to the states of metrics and to schedulers stay on its worker; metrics
    are merged when they are read. Workers with GPUs, and workers on several machines, were not tested.

    Args:
        num_workers: Number of workers. Default: the number in the cluster resolver; else one for each GPU, or without
            GPUs one for each node, on a single node one for each core that no server needs.
        num_ps: Number of parameter servers. Default: the number in the resolver; else one for four workers.
        variable_partitioner: Called with a variable's shape and dtype; returns the number of parts along each dimension
            (only the first may be split): `rd.FixedShardsPartitioner`, `rd.MinSizePartitioner`,
            `rd.MaxSizePartitioner`, or a function. None: each variable is on one server, the largest placed first.
        consistency: "async"; `rd.BoundedStaleness(k)`: no worker begins a closure more than k ahead of the slowest;
            `rd.SyncWithBackups(b)`: a step applies the first N - b gradients, and drops late ones.
        cluster_resolver: Names machines for the jobs "worker" and "ps", which must be nodes of the Ray cluster.
            Default: the environment variable TF_CONFIG if it is set.
        prefetch_pulls: Under "async": a worker's next closure uses the parameters that its last push returned, unless
            the program had read newer values when it scheduled the closure. False: every closure pulls.
        resources_per_server: Ray resources of one server, e.g. {"CPU": 2, "memory": 8e9}. Default: 1 CPU.
        timeouts: The limit of every wait, in seconds.
        resources_per_replica: Ray resources of one worker, e.g. {"CPU": 2}. Default: a GPU each, or 1 CPU each.
        failure_options: What happens when a server dies. `recover=False` makes it an `UnavailableError`. Of the others,
            only `max_failures`, `within_s` and `replace_s` apply.

    Raises:
        InvalidArgumentError: No worker or no server, a partitioner that is not a function, an unknown consistency; a
            resolver that names no worker or server, or contradicts the numbers; (when variables are placed) a
            partitioner with an invalid result, an optimizer that is not elementwise.
        DeadlineExceededError: (at the scope) the cluster can't place workers and servers within `timeouts.start_s`.

    Source: tf.distribute.ParameterServerStrategy.

    >>> strategy = ParameterServerStrategy(num_workers=2, num_ps=1)  # nothing is started yet
    >>> strategy.num_replicas_in_sync
    1
    >>> strategy.close()

    Example::

        strategy = rd.ParameterServerStrategy(num_workers=4, num_ps=1)
        with strategy.scope():
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        coordinator = rd.ClusterCoordinator(strategy)
        batches = iter(coordinator.create_per_worker_dataset(dataset.batch(64), sharding="dynamic"))
        for epoch in range(3):
            losses = [coordinator.schedule(train_step, args=(batches,)) for _ in range(100)]
            coordinator.join()
    """

    attached: dict[type, Any]
    """Objects that belong to the strategy, by their class: one of each class."""
    per_worker: PerWorkerInput
    """Per-worker datasets and values, for `rd.ClusterCoordinator`."""

    _steps_count = False

    def __init__(
        self,
        num_workers: int | None = None,
        num_ps: int | None = None,
        variable_partitioner: VariablePartitioner | None = None,
        consistency: Consistency = "async",
        cluster_resolver: ClusterResolver | None = None,
        prefetch_pulls: bool = True,
        resources_per_server: Mapping[str, float] | None = None,
        *,
        timeouts: Timeouts | None = None,
        resources_per_replica: Mapping[str, float] | None = None,
        failure_options: FailureOptions | None = None,
    ) -> None:
        super().__init__("parameter-server", timeouts)
        self._failure_options = failure_options or FailureOptions()
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise InvalidArgumentError(
                "variable_partitioner must be a function of (shape, dtype), such as rd.MinSizePartitioner(), or None, "
                f"got {variable_partitioner!r:.80}."
            )
        settings = {
            "consistency": require_consistency(consistency),
            "partitioner": variable_partitioner,
            "prefetch_pulls": bool(prefetch_pulls),
        }
        self._resolver = TFConfigClusterResolver() if cluster_resolver is None else cluster_resolver
        if not isinstance(self._resolver, ClusterResolver):
            raise InvalidArgumentError(f"cluster_resolver must be an rd.ClusterResolver, got {self._resolver!r:.80}.")
        request = PsRequest(num_workers, num_ps, resources_per_replica, resources_per_server)
        self._cluster = PsCluster(
            self._name,
            self._title,
            request.with_resolver(self._resolver),
            self._timeouts,
            settings,
            close_when_dropped=self._when_dropped.add,
            on_start=self._watch,
        )
        self._mirror = MirrorDriver(self._name, self._link(), self._cluster.device_types, row_holders=lambda: 1)
        self.per_worker = PerWorkerInput(lambda: self.num_workers, self._coordinator, self._pipelines, self._timeouts)
        self._scheduler = ClosureScheduler(
            self._mirror, self._coordinator, self.per_worker, self._summaries, self._gradient_reduce_op
        )
        self._mirror.shard_saver = PsSaver(self._mirror, self._save_shards, self._cluster.nodes)
        self._restorer = PsRestorer(
            self._mirror,
            self._run_alone,
            self._drain,
            lambda: self._cluster.launch().side,
            lambda versions: self._coordinator().note_seen(versions),
            self._timeouts.step_s,
        )
        self._uncounted = 0  # closures that count as global steps, but are not in the counter yet
        self._last_stats = StrategyStats()
        self.attached = {}

    @property
    def num_replicas_in_sync(self) -> int:
        return 1

    @property
    def num_workers(self) -> int:
        """Number of workers. If it was left open, the property may start or join Ray (limit: `Timeouts.start_s`).

        Source: raydist's own; in TensorFlow the cluster resolver has the number.

        >>> rd.ParameterServerStrategy(num_workers=2, num_ps=1).num_workers
        2
        """
        return self._cluster.num_workers

    @property
    def worker_devices(self) -> tuple[str, ...]:
        return self._cluster.worker_devices

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver that names workers and servers; by default the one of TF_CONFIG.

        Source: tf.distribute.Strategy.cluster_resolver.

        >>> rd.ParameterServerStrategy(num_workers=1, num_ps=1).cluster_resolver.cluster_spec()
        ClusterSpec({})
        """
        return self._resolver

    def _watch(self, launched: Launched) -> None:
        if self._failure_options.recover is not False:
            mirror, told = weakref.ref(self._mirror), self._metrics.note_recovery
            recovery = ServerRecovery(launched.side, mirror, self._failure_options, self._timeouts, told)
            launched.coordinator.recover_servers(recovery)
        launched.coordinator.when_done(self._summaries.take_results)
        launched.coordinator.when_done(counting(self._metrics))

    def _coordinator(self) -> Coordinator:
        return self._cluster.launch().coordinator

    def open_coordinator(self, what: str) -> Coordinator | None:
        """Return the coordinator that schedules closures; None before it is started. For `rd.ClusterCoordinator`.

        Args:
            what: The intended operation, for the error of a closed strategy.

        Source: raydist's own.
        """
        self._require_open(what)
        return None if self._cluster.launched is None else self._cluster.launched.coordinator

    @contextlib.contextmanager
    def _mark_created(self) -> Iterator[None]:
        self._cluster.launch_early()
        with self._mirror.scope():
            yield

    def _has_made(self, obj: Any) -> bool:
        return self._mirror.has_made(obj)

    def _add_steps(self, count: int) -> None:
        self._uncounted += count

    def _make_counter(self) -> StepCounter:
        counter, (count, self._uncounted) = super()._make_counter(), (self._uncounted, 0)
        if count:
            counter.value.add_(count)  # a read waits until all closures were applied
        return counter

    @folded
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> RemoteValue:
        """Give `fn` with the whole global batch to the next free worker.

        Blocks only while many closures wait already. See `Strategy.run` for the requirements on `fn`.

        Args:
            fn: The step function.
            args: A tuple of its positional arguments.
            kwargs: Keyword arguments of the function.
            options: Options of the step; only the reaction to gradients that are not finite applies.

        Returns:
            A RemoteValue, which `reduce`, `gather` and `local_results` accept.

        Raises:
            InvalidArgumentError: `fn` can't be called, or a RemoteValue is among the arguments.
            Exception: The error of an earlier closure; closures scheduled after that one are cancelled.

        Source: tf.distribute.ParameterServerStrategy.run.
        """
        self._begin_run()
        require_call(fn, args, kwargs, options)
        given, named = plain_call(args, kwargs)
        return self._scheduler.schedule(fn, given, named, options or RunOptions(), strategy=self, carried=self._carried)

    def _save_shards(self, function: Callable[..., Any], token: str, *args: Any) -> DispatchedSave:
        """Save the servers' shards once all scheduled closures have ended, before any other closure begins."""
        self._require_open("save")
        side = self._cluster.launch().side
        closure = self._schedule_alone(function, "ps_saves", PS_SAVES, args)
        ask = functools.partial(ps_save_state, closure, functools.partial(side.saved, token))
        return self._note_save(DispatchedSave(ask, self._timeouts.step_s))

    def _find_restorer(self) -> ShardRestorer | None:
        return self._restorer

    def _run_alone(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a worker's part of a restore after all scheduled closures; return the function's result."""
        self._require_open("restore")
        self._coordinator().join()
        closure = self._schedule_alone(function, "ps_restores", PS_RESTORES, args)
        return self._coordinator().value_of(closure)

    def _schedule_alone(self, function: Callable[..., Any], name: str, first: Any, args: tuple[Any, ...]) -> Closure:
        """Have a worker call a function with its own object of this `name`, while nothing else runs."""
        return self._scheduler.schedule_alone(function, (first, *args), {name: first}, strategy=self)

    def _read_remote(self, value: Any) -> Any:
        return fetched(value)

    def _num_readers(self) -> int:
        return self.num_workers

    def _first_node(self) -> str | None:
        return None if self._cluster.launched is None else self._cluster.launched.worker_hosts[0]

    def _input_side(self) -> InputSide:
        return InputSide(self._pipelines(), ReplicaCount(1), self._timeouts, drain=self._drain)

    def _drain(self) -> None:
        if self._cluster.launched is not None:
            self._cluster.launched.coordinator.join()

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        return value_fn(ValueContext(0, 1))

    def stats(self) -> StrategyStats:
        self._process.require("asked")
        if not self._closed and self._cluster.launched is not None and self._scheduler.num_steps:
            self._drain()
            self._last_stats = self._count(self._cluster.launched)
        return self._last_stats

    def _count(self, launched: Launched) -> StrategyStats:
        counts = launched.coordinator.read_all(ReplicaRunner.nonfinite_counts.__name__)
        return StrategyStats(
            self._scheduler.num_steps,
            sum(found for found, _ in counts),
            sum(skipped for _, skipped in counts),
            servers=tuple(launched.coordinator.ask_servers(launched.side.statistics)),
        )

    def __enter__(self) -> ParameterServerStrategy:
        return self

    def _finish(self) -> None:
        self._scheduler.end()  # otherwise a thread that keeps scheduling would keep the strategy open for ever
        self._drain()
        self._await_saves()
        self._metrics.publish()
        with contextlib.suppress(Exception):  # a missing count is no reason for an error at the end
            self.stats()

    def _stop(self) -> None:
        if self._cluster.launched is not None:
            self._cluster.launched.close()

    def _release_variables(self, *, fetch: bool) -> None:
        started = fetch and self._cluster.launched is not None and self._scheduler.num_steps > 0
        release_mirrored(self._mirror, self._name, "parameter servers or all workers", started=started)

    def _link(self) -> WorkersLink:
        return WorkersLink(lambda: self.num_workers, self._coordinator, lambda: self._mirror.note_steps_elsewhere())
