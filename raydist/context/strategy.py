"""The base class of all strategies."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from raydist.cluster.preemption import pass_boundary
from raydist.context.cluster_resolver import ClusterResolver
from raydist.context.current import StepCounter, enter_cross_replica, note_strategy, require_no_run
from raydist.context.extended import StrategyExtended
from raydist.context.strategy_values import StrategyStats, StrategyValues
from raydist.core.errors import FailedPreconditionError, SpecError
from raydist.core.exception_utils import folded
from raydist.core.fork_guard import OwningProcess
from raydist.core.values import InputContext, ReduceOp
from raydist.options import InputOptions, RunOptions

if TYPE_CHECKING:
    from types import TracebackType

    from torch.utils.data import DataLoader

    from raydist.dataset import Dataset

# TensorFlow's older names, so that ported code keeps working.
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


class Strategy(StrategyValues):
    """A base class: places replicas and variables, and reduces gradients.

    A strategy starts its processes when they are first needed, not in the constructor. It is a context manager: leaving
    the `with` block closes it; after an error it does not wait for anything that could hide that error. One thread uses
    a strategy; with replicas in lock step, several threads may call `run` and read results, one after the other.

    Methods that need the replicas (`scope`, `run`, `distribute_dataset`, ...) raise FailedPreconditionError once the
    strategy is closed.

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
    """True if steps count themselves, in the replicas; otherwise `_add_steps` counts them."""

    _is_default = False
    """True for the default strategy outside of every scope."""

    def __init__(self) -> None:
        self._closed = False
        self._counter: StepCounter | None = None  # made by the first request for the global step
        self._process = OwningProcess(f"This {type(self).__name__}")
        note_strategy(self)

    @property
    @abstractmethod
    def worker_devices(self) -> tuple[str, ...]:
        """One device name per replica, in rank order: ("CPU:0", "CPU:1"). May block like `num_replicas_in_sync`.

        Source: tf.distribute.Strategy.extended.worker_devices.

        >>> rd.OneDeviceStrategy("cpu").worker_devices
        ('CPU:0',)
        """

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that names the strategy's machines; None without one.

        Source: tf.distribute.Strategy.cluster_resolver.

        >>> rd.OneDeviceStrategy("cpu").cluster_resolver is None
        True
        """
        return None

    @final
    @property
    def extended(self) -> StrategyExtended:
        """Further methods of tf.distribute: `reduce_to`, `update`, `call_for_each_replica`, ...

        Source: tf.distribute.Strategy.extended.

        >>> rd.OneDeviceStrategy("cpu").extended.parameter_devices
        ('CPU:0',)
        """
        return StrategyExtended(self)

    @final
    @contextlib.contextmanager
    def scope(self, *, gradient_reduce_op: ReduceOp | str | None = None) -> Iterator[Strategy]:
        """Make modules, optimizers, schedulers and metrics that are built inside belong to this strategy.

        A context manager. The same scope may be entered again, also inside of itself. Strategies with replica actors
        begin to start them here, without waiting; the devices must fit into the cluster within `Timeouts.start_s`.

        Args:
            gradient_reduce_op: Default reduction of gradients in every later `run`: `ReduceOp.MEAN` weights each
                replica by its rows, `ReduceOp.SUM` adds. None keeps the present default (at first MEAN).

        Returns:
            A context manager whose value is this strategy.

        Raises:
            FailedPreconditionError: The strategy is closed, another strategy's scope is open, or this is a step.
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
        """Return a context that assigns objects created inside to this strategy."""

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

        Inside, `rd.get_replica_context()` returns the replica's context. When a `backward()` in it returns, gradients
        are those of the global batch. Replica actors get `fn` and its plain arguments by value; modules and optimizers
        of the scope are not sent: each replica has its own copy, and the strategy keeps the copies equal. The step uses
        the modes of this call: `torch.no_grad`, `inference_mode`, `autocast` or `set_detect_anomaly`, the default
        dtype, deterministic algorithms, and the precision of matrix products.

        With replica actors the call returns once the step is dispatched, and blocks only while some steps are in flight
        already; reading a value waits for it (limit: `Timeouts.step_s`). The structure of the result is assumed to be
        that of the last call of the same function; the first call of a function without the annotation `-> None` blocks
        to learn the structure. On one device `fn` runs at once.

        Args:
            fn: The step function.
            args: A tuple of its positional arguments, nests of any values. A leaf of a distributed batch, of a result
                of `run` or of `distribute_values_from_function` is split; an iterator of a distributed dataset gives
                each replica its pieces; every replica gets all other values whole.
            kwargs: Keyword arguments, with the same rules.
            options: Options of the step: reduction of gradients, replicas without rows, ...

        Returns:
            The nest that `fn` returned with a PerReplica for each leaf, and None for None; with one replica the plain
            nest. Tensors from replica actors are detached and on the CPU.

        Raises:
            FailedPreconditionError: The strategy is closed, this is a step already, or `fn` uses an object that was not
                made under the scope or can't be pickled.
            InvalidArgumentError: `fn` can't be called, `args` is not a tuple, or contains a whole dataset. Raised when
                a result is read: `fn` returned another structure than in its last call.
            Exception: The error of `fn`, of its own type, with a note on step and replica: here, or when a result is
                read, or at the latest from the next call that waits. The strategy can be used afterwards.

        Source: tf.distribute.Strategy.run.

        >>> import torch
        >>> strategy = rd.OneDeviceStrategy("cpu")
        >>> strategy.run(lambda x, scale: {"sum": x.sum() * scale}, args=(torch.tensor([1, 2]),), kwargs={"scale": 2})
        {'sum': tensor(6)}
        """

    @abstractmethod
    def distribute_dataset(self, dataset: Dataset | DataLoader[Any], options: InputOptions | None = None) -> Any:
        """Distribute a dataset, batched by the *global* batch size: each replica gets its piece of every batch.

        With replica actors, an actor makes batches while replicas train on earlier ones. Does not block; iterators of
        the result block until their next batch is there (limit: `Timeouts.input_s`).

        Shapes: a batch of b rows -> pieces of ceil(b / N) rows for N replicas, later ones shorter or empty
            (`InputOptions.split` has another way).

        Args:
            dataset: A dataset whose last step is `batch`, by rows of all replicas together; or a torch DataLoader,
                whose batch size is then the global one: see `Dataset.from_torch`.
            options: Workers, buffers, and the way in which a batch is split.

        Returns:
            A DistributedDataset: each `iter()` of it begins an epoch, whose batches have one PerReplica per leaf (plain
            tensors for one replica), on the replica's device.

        Raises:
            FailedPreconditionError: The strategy is closed.
            SpecError: `dataset` is neither.
            InvalidArgumentError: The dataset was never batched; there are fewer files than workers, under
                `AutoShardPolicy.FILE` and `AUTO`; or `options` are for datasets from a function. While iterating: the
                leaves of a batch do not have equally many rows (mark whole values with `rd.Replicated`).
            NotFoundError: The dataset reads no files, under `AutoShardPolicy.FILE` with several workers.

        Source: tf.distribute.Strategy.experimental_distribute_dataset.

        >>> strategy = rd.OneDeviceStrategy("cpu")
        >>> [batch.tolist() for batch in strategy.distribute_dataset(rd.Dataset.range(5).batch(3))]
        [[0, 1, 2], [3, 4]]
        """

    @abstractmethod
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Dataset], options: InputOptions | None = None
    ) -> Any:
        """Distribute datasets that the user batches per replica; nothing is split or added.

        Each replica in turn takes one of the function's batches, so N batches make one step. Blocks like
        `distribute_dataset`.

        Args:
            dataset_fn: Makes the dataset, batched by rows of *one* replica; called with an InputContext once per worker
                (node), whose replicas take turns (once per replica with `InputOptions.per_replica`).
            options: Workers, buffers, and the number of calls of `dataset_fn`.

        Returns:
            A DistributedDataset, as from `distribute_dataset`.

        Raises:
            FailedPreconditionError: The strategy is closed.
            SpecError: `dataset_fn` did not return a raydist.Dataset.

        Source: tf.distribute.Strategy.distribute_datasets_from_function.

        >>> def make(context):
        ...     return rd.Dataset.range(4).batch(context.get_per_replica_batch_size(2))
        >>> batches = rd.OneDeviceStrategy("cpu").distribute_datasets_from_function(make)
        >>> [batch.tolist() for batch in batches]
        [[0, 1], [2, 3]]
        """

    @final
    def make_numpy_dataset(self, arrays: Any) -> Dataset:
        """Make a dataset of the rows of a nest of arrays: `Dataset.from_tensor_slices`. Does not block.

        Args:
            arrays: A nest of arrays, tensors or lists of one length.

        Returns:
            A Dataset of that many elements.

        Raises:
            InvalidArgumentError: A leaf is a single number, or the numbers of rows differ.

        Source: tf.distribute.Strategy.experimental_make_numpy_dataset.

        >>> [element["x"].item() for element in rd.OneDeviceStrategy("cpu").make_numpy_dataset({"x": [1, 2]})]
        [1, 2]
        """
        from raydist.dataset import Dataset  # not imported by replicas, which do not need it: half of their imports

        return Dataset.from_tensor_slices(arrays)

    @abstractmethod
    def stats(self) -> StrategyStats:
        """Return counts so far: steps, gradients that were not finite, and skipped updates.

        Blocks until dispatched steps are done (limit: `Timeouts.step_s`). After `close` the last counts remain.

        Returns:
            A StrategyStats.

        Raises:
            Exception: The error of a dispatched step, if it was not raised before.

        >>> rd.OneDeviceStrategy("cpu").stats().skipped_updates
        0
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for dispatched steps, fetch the final values of the variables, and stop everything that was started.

        Blocks until the steps are done (limit: `Timeouts.step_s`) and all processes have stopped (limit:
        `Timeouts.close_s`; processes that are still alive then are killed). A second call does nothing. Variables
        become plain modules and optimizers with their last values.

        Raises:
            Exception: The error of a step, if it was not raised before; everything is stopped nevertheless.

        >>> strategy = rd.OneDeviceStrategy("cpu")
        >>> strategy.close()
        >>> strategy.run(len, args=([],))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        raydist.core.errors.FailedPreconditionError: This OneDeviceStrategy is closed and can't run a step. Make ...
        """

    @abstractmethod
    def _abort(self, *, fetch: bool) -> None:
        """Stop everything without raising; with `fetch` variables get their final values if possible."""

    def __enter__(self) -> Strategy:
        return self

    @folded
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After an error a second one would hide the first; after Ctrl-C nothing may block.
        if kind is None:
            self.close()
        else:
            self._abort(fetch=issubclass(kind, Exception))

    def __getattr__(self, name: str) -> Any:
        if name in _ALIASES:
            return getattr(self, _ALIASES[name])
        found = getattr(type(self), name, None)
        if isinstance(found, property):  # the property raised an AttributeError, so that Python calls this
            return found.__get__(self)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}.")

    def _find_counter(self) -> StepCounter | None:
        """Return the global step counter, if there is one."""
        return self._counter

    def _has_made(self, obj: Any) -> bool:
        """Return True if a module or a variable was made under the strategy's scope."""
        return False

    def _carried(self) -> tuple[StepCounter, ...]:
        """Return objects that replicas need even if a step does not refer to them."""
        return () if self._counter is None else (self._counter,)

    def _add_steps(self, count: int) -> None:
        """Count steps of training; does nothing here, because steps count themselves."""

    def _find_restorer(self) -> Any:
        """Return the `ShardRestorer` for objects that are held elsewhere; None if the driver restores all objects."""
        return None

    def _make_counter(self) -> StepCounter:
        """Return the global step counter, created in the scope, hence mirrored, if necessary."""
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
        """Check that `run` may be called, and pass a step boundary."""
        require_no_run()
        self._require_open("run a step")
        pass_boundary()

    def _require_open(self, what: str) -> None:
        self._process.require("used")
        if self._closed:
            raise FailedPreconditionError(f"This {type(self).__name__} is closed and can't {what}. Make a new one.")


def require_dataset(dataset: Any) -> Dataset:
    """Return `dataset`, or the Dataset of a torch DataLoader's batches; raise SpecError for anything else."""
    from raydist.dataset import Dataset  # not imported by replicas, which do not need it: half of their imports
    from raydist.pipelines.sources.torch_datasets import is_torch_loader

    if is_torch_loader(dataset):
        return Dataset.from_torch(dataset)
    if not isinstance(dataset, Dataset):
        raise SpecError(
            f"A raydist.Dataset or a torch DataLoader must be given, got {type(dataset).__name__}. "
            "Make one with Dataset.from_tensor_slices, from_torch, from_generator or another source."
        )
    return dataset
