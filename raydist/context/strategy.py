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
    """Tells a value function for which replica it computes (tf.distribute.experimental.ValueContext)."""

    def __init__(self, replica_id_in_sync_group: int, num_replicas_in_sync: int) -> None:
        self.replica_id_in_sync_group = replica_id_in_sync_group
        self.num_replicas_in_sync = num_replicas_in_sync


class Strategy(ABC):
    """Decides where replicas run, where variables live and how gradients meet (tf.distribute.Strategy).

    A strategy is a context manager: leaving `with` closes it.
    """

    def __init__(self) -> None:
        self._closed = False

    @property
    @abstractmethod
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose gradients are added in one step."""

    @property
    @abstractmethod
    def worker_devices(self) -> tuple[str, ...]:
        """One device name per replica: ("CPU:0", "CPU:1")."""

    @final
    @contextlib.contextmanager
    def scope(self, *, gradient_reduce_op: ReduceOp | str | None = None) -> Iterator[Strategy]:
        """Modules, optimizers, schedulers and metrics built inside are this strategy's (tf.distribute.Strategy.scope).

        Args:
            gradient_reduce_op: How gradients meet in every later `run` that says nothing else: MEAN (by rows) or SUM.
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
        """Run `fn` once on every replica, each on its part of the PerReplica arguments (tf.distribute.Strategy.run).

        Returns:
            The nest that `fn` returned with a PerReplica for each leaf (the plain nest from one replica).

        Blocking: dispatch is asynchronous within a bounded window; values are fetched when they are read. An error in a
        step is raised at the latest by the next synchronising call.
        """

    @abstractmethod
    def distribute_dataset(self, dataset: Dataset, options: InputOptions | None = None) -> Any:
        """A view of a dataset, batched by the *global* batch size, that gives each replica its piece of every batch.

        Source: tf.distribute.Strategy.experimental_distribute_dataset.
        """

    @abstractmethod
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Dataset], options: InputOptions | None = None
    ) -> Any:
        """Like `distribute_dataset` for datasets that the user batches per replica; nothing is split or added."""

    @final
    def make_numpy_dataset(self, arrays: Any) -> Dataset:
        """A dataset of the rows of a nest of arrays (tf.distribute.Strategy.experimental_make_numpy_dataset)."""
        return Dataset.from_tensor_slices(arrays)

    @abstractmethod
    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """One value per replica, computed here by `value_fn(context)`."""

    @final
    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None = None) -> Any:
        """Reduce a value over replicas, waiting for it (tf.distribute.Strategy.reduce).

        Args:
            reduce_op: SUM or MEAN.
            value: A nest of PerReplica. Results of replicas without rows are passed over.
            axis: None adds element by element (shapes must agree). An axis reduces over that dimension as well; MEAN
                then divides by the true number of entries: rows [0, 1, 2, 3] and [4, 5] give sum 15, mean 2.5.
        """
        return reduce(reduce_op, value, axis, self.num_replicas_in_sync)

    @final
    def gather(self, value: Any, axis: int = 0) -> Any:
        """Concatenate a value over replicas in rank order, waiting for it (tf.distribute.Strategy.gather)."""
        return gather(value, axis)

    @final
    def local_results(self, value: Any) -> tuple[Any, ...]:
        """One value per replica in rank order, nests as nests; any other value alone in a tuple. Waits for them."""
        return local_results(value)

    @abstractmethod
    def close(self) -> None:
        """Wait for dispatched steps, fetch final values, stop all, raise a pending error. May be called twice."""

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
        raise InvalidArgumentError(f"strategy.run needs a function, got {fn!r:.80}.")
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
