"""What every strategy offers: the same calls, whatever runs underneath."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from raydist.context.cluster_resolver import ClusterResolver
from raydist.context.current import enter_cross_replica, require_no_run
from raydist.context.extended import StrategyExtended
from raydist.context.step_counter import StepCounter
from raydist.context.strategy_input import StrategyInput
from raydist.context.strategy_stats import StrategyStats
from raydist.context.strategy_values import StrategyValues
from raydist.context.training_strategy import note_strategy
from raydist.errors import FailedPreconditionError
from raydist.foreign_errors import folded
from raydist.options import RunOptions
from raydist.owning_process import OwningProcess
from raydist.preemption.boundaries import pass_boundary
from raydist.values import ReduceOp

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Strategy"]

# TensorFlow's older spellings, so that code moved over keeps working.
_ALIASES = {
    "experimental_distribute_dataset": "distribute_dataset",
    "experimental_distribute_datasets_from_function": "distribute_datasets_from_function",
    "experimental_distribute_values_from_function": "distribute_values_from_function",
    "experimental_local_results": "local_results",
    "experimental_make_numpy_dataset": "make_numpy_dataset",
    "experimental_run": "run",
    "experimental_run_v2": "run",
    "unwrap": "local_results",
}


class Strategy(StrategyInput, StrategyValues):
    """Decides where replicas run, where variables live and how gradients meet.

    What a strategy runs it starts when that is first needed, not when it is made. It is a context manager: leaving
    `with` closes it; after an error nothing is waited for that could hide that error. One thread uses a strategy;
    where replicas are in lock step, several may call `run` and read results: they take turns.

    Methods that need its replicas (`scope`, `run`, `distribute_dataset`, ...) raise FailedPreconditionError once it is
    closed.

    Source: tf.distribute.Strategy; its older names (`experimental_run_v2`, `experimental_local_results`, ...) are kept.

    >>> import torch
    >>> with rd.OneDeviceStrategy("cpu") as strategy:
    ...     with strategy.scope():
    ...         model = torch.nn.Linear(1, 1)
    ...         optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     def train_step(batch):
    ...         optimizer.zero_grad()
    ...         loss = model(batch).square().mean()
    ...         loss.backward()
    ...         optimizer.step()
    ...         return loss.detach()
    ...     dataset = rd.Dataset.from_tensor_slices(torch.ones(6, 1)).batch(4)
    ...     losses = [strategy.run(train_step, args=(batch,)) for batch in strategy.distribute_dataset(dataset)]
    >>> len(losses)
    2
    """

    _steps_count = True
    """Whether a step counts itself, in the replicas; else `_add_steps` is told."""

    _is_default = False
    """Whether it only stands for there being none."""

    def __init__(self) -> None:
        self._closed = False
        self._counter: StepCounter | None = None  # made when somebody asks for the global step
        self._process = OwningProcess(f"This {type(self).__name__}")
        note_strategy(self)

    @property
    @abstractmethod
    def worker_devices(self) -> tuple[str, ...]:
        """One device name per replica, in rank order: ("CPU:0", "CPU:1"). Blocks as `num_replicas_in_sync` may.

        Source: tf.distribute.Strategy.extended.worker_devices.

        >>> rd.OneDeviceStrategy("cpu").worker_devices
        ('CPU:0',)
        """

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """What says which machines the strategy has; None where nothing does.

        Source: tf.distribute.Strategy.cluster_resolver.

        >>> rd.OneDeviceStrategy("cpu").cluster_resolver is None
        True
        """
        return None

    @final
    @property
    def extended(self) -> StrategyExtended:
        """tf.distribute's further methods: `reduce_to`, `update`, `call_for_each_replica`, ...

        Source: tf.distribute.Strategy.extended.

        >>> rd.OneDeviceStrategy("cpu").extended.parameter_devices
        ('CPU:0',)
        """
        return StrategyExtended(self)

    @final
    @contextlib.contextmanager
    def scope(self, *, gradient_reduce_op: ReduceOp | str | None = None) -> Iterator[Strategy]:
        """Modules, optimizers, schedulers and metrics built inside are this strategy's.

        A context manager. The same scope may be entered again, also inside of itself. Strategies with replica actors
        begin to start them here and do not wait for them; the devices must fit into the cluster within
        `Timeouts.start_s`.

        Args:
            gradient_reduce_op: How gradients meet in every later `run` that says nothing else: `ReduceOp.MEAN` weighs
                each replica by its rows, `ReduceOp.SUM` adds. None leaves it as it is (MEAN, if nobody said).

        Returns:
            What `with` gives is this strategy.

        Raises:
            FailedPreconditionError: The strategy is closed, the scope of another one is open, or this is a step.
            InvalidArgumentError: `gradient_reduce_op` is neither MEAN nor SUM.
            DeadlineExceededError: The cluster can't place the replicas in time.

        Source: tf.distribute.Strategy.scope.

        >>> import torch
        >>> strategy = rd.OneDeviceStrategy("cpu")
        >>> with strategy.scope():
        ...     model = torch.nn.Linear(2, 1)
        ...     rd.get_strategy() is strategy
        True
        """
        self._require_open("enter the scope")
        if gradient_reduce_op is not None:
            self._set_gradient_reduce_op(RunOptions(gradient_reduce_op=ReduceOp.parse(gradient_reduce_op)))
        with enter_cross_replica(self), self._mark_created():
            yield self

    @abstractmethod
    def _mark_created(self) -> contextlib.AbstractContextManager[None]:
        """Note what is created inside as this strategy's."""

    @abstractmethod
    def _set_gradient_reduce_op(self, options: RunOptions) -> None:
        """Make the reduction of `options` the default."""

    @abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Run `fn` once on every replica, each on its part of the PerReplica arguments.

        Inside, `rd.get_replica_context()` tells which replica it is. When a `backward()` in it returns, gradients are
        those of the global batch. With replica actors `fn` and its plain arguments are sent by value; modules and
        optimizers of the scope are not sent, each replica has its own copy of them, kept equal. It computes as the
        program would here: within `torch.no_grad`, `inference_mode`, `autocast` or `set_detect_anomaly` where the call
        stands in such a block, with its default dtype, its choice of deterministic algorithms and of the precision of
        products.

        Blocking: with replica actors the call returns once the step is dispatched, and waits only while some steps are
        under way already; values are fetched when they are read (limit: `Timeouts.step_s`). The structure of the result
        is assumed to be that of the last call of the same function; the first call of a function that is not annotated
        `-> None` waits to learn it. On one device `fn` runs at once.

        Args:
            fn: The step function.
            args: A tuple of its positional arguments, nests of anything. A leaf of a distributed batch, of a result of
                `run` or of `distribute_values_from_function` is split; an iterator of a distributed dataset gives each
                replica its pieces; everything else reaches all replicas alike.
            kwargs: Its keyword arguments, likewise.
            options: How gradients meet, and what replicas without rows do.

        Returns:
            The nest that `fn` returned with a PerReplica for each leaf, and None for None; from one replica the plain
            nest. Tensors are detached and on the CPU where they come from replica actors.

        Raises:
            FailedPreconditionError: The strategy is closed, this is a step already, or `fn` uses what was not made
                under the scope or can't be pickled.
            InvalidArgumentError: `fn` can't be called, `args` is no tuple, or it has a whole dataset in it. Or, where a
                result is read, `fn` returned another structure than in its last call.
            Exception: What `fn` raised, of its own type, with a note on step and replica: here, or where the results
                are read, or at the latest from the next call that waits. The strategy goes on afterwards.

        Source: tf.distribute.Strategy.run.

        >>> import torch
        >>> strategy = rd.OneDeviceStrategy("cpu")
        >>> strategy.run(lambda x, scale: {"sum": x.sum() * scale}, args=(torch.tensor([1, 2]),), kwargs={"scale": 2})
        {'sum': tensor(6)}
        """

    @abstractmethod
    def stats(self) -> StrategyStats:
        """What has been done so far: steps, gradients that were not finite, updates that were skipped.

        Blocks until dispatched steps are done (limit: `Timeouts.step_s`). After `close` the last numbers remain.

        Returns:
            A StrategyStats.

        Raises:
            Exception: What a dispatched step raised and nobody was told so far.

        >>> rd.OneDeviceStrategy("cpu").stats().skipped_updates
        0
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for dispatched steps, fetch the variables' final values, and stop all that was started.

        Blocks until the steps are done (limit: `Timeouts.step_s`) and everything has stopped (limit:
        `Timeouts.close_s`, what still lives then is killed). A second call does nothing. Variables become plain
        modules and optimizers with the values they had last.

        Raises:
            Exception: What a step raised and nobody was told so far; everything is stopped all the same.

        >>> strategy = rd.OneDeviceStrategy("cpu")
        >>> strategy.close()
        >>> strategy.run(len, args=([],))
        Traceback (most recent call last):
            ...
        raydist.errors.FailedPreconditionError: This OneDeviceStrategy is closed and can't run a step. Make a new one.
        """

    @abstractmethod
    def _abort(self, *, fetch: bool) -> None:
        """Stop everything without raising; with `fetch` variables get their final values where that is possible."""

    def __enter__(self) -> Strategy:
        return self

    @folded
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After an error a second one would hide the first; after Ctrl-C nothing may be waited for.
        if kind is None:
            self.close()
        else:
            self._abort(fetch=issubclass(kind, Exception))

    def __getattr__(self, name: str) -> Any:
        if name in _ALIASES:
            return getattr(self, _ALIASES[name])
        found = getattr(type(self), name, None)
        if isinstance(found, property):  # it raised an AttributeError, for which Python asks here
            return found.__get__(self)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}.")

    def _find_counter(self) -> StepCounter | None:
        """What counts global steps, once there is one."""
        return self._counter

    def _has_made(self, obj: Any) -> bool:
        """Whether a module or a variable was made under its scope, where it has one."""
        return False

    def _carried(self) -> tuple[StepCounter, ...]:
        """What replicas are to have whether a step reaches it or not."""
        return () if self._counter is None else (self._counter,)

    def _add_steps(self, count: int) -> None:
        """So many batches were trained on. Here steps count for themselves."""

    def _find_restorer(self) -> Any:
        """What restores objects where they are held, a `ShareRestorer`; None where the driver does."""
        return None

    def _make_counter(self) -> StepCounter:
        """What counts global steps, mirrored as all that is made in the scope."""
        if self._counter is None:
            self._require_open("make its global step, for which nobody asked while it was open")
            with self.scope():
                self._counter = StepCounter()
        return self._counter

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FailedPreconditionError(
            f"A strategy must stay in the process that made it, but this {type(self).__name__} was to be pickled or "
            "copied: its replicas, variables and results belong to that process. Make a strategy where it is used; in "
            "a step rd.get_strategy() gives it, in a function of map leave it out."
        )

    def _begin_run(self) -> None:
        """`run` was called: this is a boundary between two steps."""
        require_no_run()
        self._require_open("run a step")
        pass_boundary()

    def _require_open(self, what: str) -> None:
        self._process.require("used")
        if self._closed:
            raise FailedPreconditionError(f"This {type(self).__name__} is closed and can't {what}. Make a new one.")
