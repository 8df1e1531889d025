"""What every strategy offers: the same calls, whatever runs underneath."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from raydist.context.cross_replica import gather, local_results, reduce
from raydist.context.current import enter_cross_replica
from raydist.dataset import Dataset
from raydist.distributed_dataset import DistributedDataset
from raydist.errors import FailedPreconditionError, InvalidArgumentError, SpecError
from raydist.options import InputOptions, RunOptions
from raydist.values import InputContext, ReduceOp

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Strategy", "ValueContext"]

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


@final
class ValueContext:
    """Tells a value function for which replica it computes.

    Attributes:
        replica_id_in_sync_group: The replica's rank, 0 .. num_replicas_in_sync - 1.
        num_replicas_in_sync: All replicas.

    Args:
        replica_id_in_sync_group: See above.
        num_replicas_in_sync: See above.

    Source: tf.distribute.experimental.ValueContext.

    >>> context = rd.ValueContext(replica_id_in_sync_group=1, num_replicas_in_sync=3)
    >>> context.replica_id_in_sync_group, context.num_replicas_in_sync
    (1, 3)
    """

    def __init__(self, replica_id_in_sync_group: int, num_replicas_in_sync: int) -> None:
        self.replica_id_in_sync_group = replica_id_in_sync_group
        self.num_replicas_in_sync = num_replicas_in_sync


class Strategy(ABC):
    """Decides where replicas run, where variables live and how gradients meet.

    What a strategy runs it starts when that is first needed, not when it is made. It is a context manager: leaving
    `with` closes it; after an error nothing is waited for that could hide that error. One thread uses a strategy.

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

    def __init__(self) -> None:
        self._closed = False

    @property
    @abstractmethod
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose gradients meet in one step, >= 1.

        Where a strategy finds its devices by itself, the first question may start or join Ray (limit:
        `Timeouts.start_s`).

        Source: tf.distribute.Strategy.num_replicas_in_sync.

        >>> rd.OneDeviceStrategy("cpu").num_replicas_in_sync
        1
        """

    @property
    @abstractmethod
    def worker_devices(self) -> tuple[str, ...]:
        """One device name per replica, in rank order: ("CPU:0", "CPU:1"). Blocks as `num_replicas_in_sync` may.

        Source: tf.distribute.Strategy.extended.worker_devices.

        >>> rd.OneDeviceStrategy("cpu").worker_devices
        ('CPU:0',)
        """

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
        optimizers of the scope are not sent, each replica has its own copy of them, kept equal.

        Blocking: with replica actors the call returns once the step is dispatched, and waits only while some steps are
        under way already; values are fetched when they are read (limit: `Timeouts.step_s`). On one device it runs `fn`
        at once.

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
            InvalidArgumentError: `fn` can't be called, `args` is no tuple, or it has a whole dataset in it.
            Exception: What `fn` raised, of its own type, with a note on step and replica: here, or where the results
                are read, or at the latest from the next call that waits. The strategy goes on afterwards.

        Source: tf.distribute.Strategy.run.

        >>> import torch
        >>> strategy = rd.OneDeviceStrategy("cpu")
        >>> strategy.run(lambda x, scale: {"sum": x.sum() * scale}, args=(torch.tensor([1, 2]),), kwargs={"scale": 2})
        {'sum': tensor(6)}
        """

    @abstractmethod
    def distribute_dataset(self, dataset: Dataset, options: InputOptions | None = None) -> Any:
        """A view of a dataset, batched by the *global* batch size, that gives each replica its piece of every batch.

        With replica actors, batches are made on an actor while earlier ones are trained on. Waits for nothing; the
        iterators of the view wait for their next batch (limit: `Timeouts.input_s`).

        Shapes: a batch of b rows -> pieces of ceil(b / N) rows for N replicas, later ones shorter or empty
            (`InputOptions.split` has another way).

        Args:
            dataset: A dataset whose last step is `batch`, by rows of all replicas together.
            options: Workers, buffers, and how a batch is split.

        Returns:
            A DistributedDataset: each `iter()` of it is a pass, whose batches have one PerReplica per leaf (plain
            tensors for one replica), on the replica's device.

        Raises:
            FailedPreconditionError: The strategy is closed.
            SpecError: `dataset` is no raydist.Dataset.

        Source: tf.distribute.Strategy.experimental_distribute_dataset.

        >>> strategy = rd.OneDeviceStrategy("cpu")
        >>> [batch.tolist() for batch in strategy.distribute_dataset(rd.Dataset.range(5).batch(3))]
        [[0, 1, 2], [3, 4]]
        """

    @abstractmethod
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Dataset], options: InputOptions | None = None
    ) -> Any:
        """Like `distribute_dataset` for datasets that the user batches per replica; nothing is split or added.

        Each replica in turn takes one of the function's batches, so N of them make one step. Waits as
        `distribute_dataset` does.

        Args:
            dataset_fn: Makes the dataset, batched by rows of *one* replica; called with an InputContext once per input
                pipeline (once per replica with `InputOptions.per_replica`).
            options: Workers, buffers, and how often `dataset_fn` is called.

        Returns:
            A DistributedDataset, as `distribute_dataset` gives one.

        Raises:
            FailedPreconditionError: The strategy is closed.
            SpecError: `dataset_fn` gave no raydist.Dataset.

        Source: tf.distribute.Strategy.distribute_datasets_from_function.

        >>> def make(context):
        ...     return rd.Dataset.range(4).batch(context.get_per_replica_batch_size(2))
        >>> batches = rd.OneDeviceStrategy("cpu").distribute_datasets_from_function(make)
        >>> [batch.tolist() for batch in batches]
        [[0, 1], [2, 3]]
        """

    @final
    def make_numpy_dataset(self, arrays: Any) -> Dataset:
        """A dataset of the rows of a nest of arrays: `Dataset.from_tensor_slices`. Waits for nothing.

        Args:
            arrays: A nest of arrays, tensors or lists of one length.

        Returns:
            A Dataset of that many elements.

        Raises:
            InvalidArgumentError: A leaf is a single number, or numbers of rows differ.

        Source: tf.distribute.Strategy.experimental_make_numpy_dataset.

        >>> [element["x"].item() for element in rd.OneDeviceStrategy("cpu").make_numpy_dataset({"x": [1, 2]})]
        [1, 2]
        """
        return Dataset.from_tensor_slices(arrays)

    @abstractmethod
    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """One value per replica, computed in this process and at once.

        Args:
            value_fn: Called with a ValueContext once per replica, in rank order.

        Returns:
            A PerReplica of what it gave, to be an argument of `run`; from one replica its plain value.

        Source: tf.distribute.Strategy.experimental_distribute_values_from_function.

        >>> rd.OneDeviceStrategy("cpu").distribute_values_from_function(lambda context: context.num_replicas_in_sync)
        1
        """

    @final
    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None = None) -> Any:
        """Reduce a value over replicas.

        Blocks until the steps that it comes from are done (limit: `Timeouts.step_s`), and raises their errors.

        Shapes: (...) on every replica -> (...); with an axis that dimension is gone, and its lengths may differ.

        Args:
            reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or its name.
            value: A nest of PerReplica, tensors and numbers. Results of replicas without rows are passed over.
            axis: None adds element by element (shapes must agree). An axis, or several, reduces over that dimension as
                well; MEAN then divides by the true number of entries: rows [0, 1, 2, 3] and [4, 5] give sum 15, mean
                2.5.

        Returns:
            The nest with a tensor on the CPU for each leaf.

        Raises:
            InvalidArgumentError: Another reduction, shapes that do not fit, an axis that is none, a plain value under
                SUM with several replicas, or a value that no replica had rows for.
            SpecError: A leaf is neither a tensor nor a number.

        Source: tf.distribute.Strategy.reduce.

        >>> import torch
        >>> rd.OneDeviceStrategy("cpu").reduce(rd.ReduceOp.MEAN, torch.tensor([1.0, 3.0]), axis=0)
        tensor(2.)
        """
        return reduce(reduce_op, value, axis, self.num_replicas_in_sync)

    @final
    def gather(self, value: Any, axis: int = 0) -> Any:
        """Concatenate a value over replicas in rank order.

        Blocks until the steps that it comes from are done (limit: `Timeouts.step_s`), and raises their errors.

        Shapes: (n_i, ...) on replica i -> (sum of n_i, ...), where n_i is the length along `axis`.

        Args:
            value: A nest of PerReplica and tensors. Results of replicas without rows are passed over.
            axis: The dimension along which to concatenate; negative ones count from the end.

        Returns:
            The nest with a tensor on the CPU for each leaf.

        Raises:
            InvalidArgumentError: Scalars, other dimensions that differ, or a value that no replica had rows for.
            SpecError: A leaf is neither a tensor nor a number.

        Source: tf.distribute.Strategy.gather.

        >>> import torch
        >>> rd.OneDeviceStrategy("cpu").gather(torch.tensor([1, 2]))
        tensor([1, 2])
        """
        return gather(value, axis)

    @final
    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of single replicas.

        Blocks until the steps that they come from are done (limit: `Timeouts.step_s`), and raises their errors.

        Args:
            value: A nest of PerReplica and anything else.

        Returns:
            One nest per replica in rank order, results of replicas without rows left out; a value without a PerReplica
            in it alone in a tuple.

        Source: tf.distribute.Strategy.experimental_local_results.

        >>> rd.OneDeviceStrategy("cpu").local_results(rd.PerReplica([3, 4]))
        (3, 4)
        """
        return local_results(value)

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
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}.")

    def _require_open(self, what: str) -> None:
        if self._closed:
            raise FailedPreconditionError(f"This {type(self).__name__} is closed and can't {what}. Make a new one.")


def require_call(fn: Any, args: Any) -> None:
    """InvalidArgumentError unless `strategy.run(fn, args)` can be meant so."""
    if not callable(fn):
        raise InvalidArgumentError(
            f"strategy.run needs a function, got {fn!r:.80}. Give the function itself and its arguments as args."
        )
    if not isinstance(args, tuple | list):
        raise InvalidArgumentError(
            f"args must be a tuple of the function's arguments, got {type(args).__name__}. For one: args=(batch,)."
        )
    if any(isinstance(arg, DistributedDataset) for arg in args):
        raise InvalidArgumentError(
            "A step takes batches or an iterator, got a DistributedDataset. Give args=(iter(dataset),) to loop inside."
        )


def require_dataset(dataset: Any) -> Dataset:
    """`dataset` itself; SpecError unless it is a raydist Dataset."""
    if not isinstance(dataset, Dataset):
        raise SpecError(
            f"A raydist.Dataset must be given, got {type(dataset).__name__}. "
            "Make one with Dataset.from_tensor_slices, from_generator or another source."
        )
    return dataset
