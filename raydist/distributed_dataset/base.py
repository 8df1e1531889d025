"""What every strategy gives for a dataset: batches with one part per replica. Has no transformations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self, final

from raydist.distributed_dataset.epochs import Epochs
from raydist.errors import FailedPreconditionError, InvalidArgumentError
from raydist.options import InputOptions
from raydist.pipelines.metering.stats import PipelineStats
from raydist.pipelines.run.optional import Optional

if TYPE_CHECKING:
    from raydist.dataset import Dataset
    from raydist.pipelines.elements.items import IteratorState

__all__ = ["DistributedDataset", "ResumableIterator", "require_batches", "require_shared"]


def require_shared(options: InputOptions) -> None:
    """InvalidArgumentError for options that want a pipeline for each replica, where one dataset serves them all."""
    if options.per_replica:
        raise InvalidArgumentError(
            "per_replica (InputReplicationMode.PER_REPLICA) is for distribute_datasets_from_function, whose function "
            f"is then called once per replica, but one dataset was given with {options}. Leave it out, or use that "
            "method."
        )


def require_batches(dataset: Dataset) -> None:
    """InvalidArgumentError for a dataset that was never batched: each replica would get a part of every row's features.

    Where a function of the user's may have made batches, nobody can tell, and the dataset is taken as it is.
    """
    if dataset._op.gives_rows:
        raise InvalidArgumentError(
            "A dataset must be batched by the global batch size before it is distributed, got the rows of "
            f"{dataset!r}. Call .batch(global_batch_size) on it. If its rows are batches already, say so with a map "
            "that returns them."
        )


class ResumableIterator(Protocol):
    """What `iter()` of a distributed dataset gives, whoever makes the batches."""

    @property
    def element_spec(self) -> Any:
        """Nest of TensorSpec of one replica's part of a batch."""

    def __iter__(self) -> Self: ...

    def __next__(self) -> Any: ...

    def get_next(self) -> Any:
        """Like `next`, but raises OutOfRangeError at the end."""

    def get_next_as_optional(self) -> Optional[Any]:
        """The next batch, or an empty Optional at the end."""

    def state_dict(self) -> IteratorState:
        """JSON-able state after the last batch handed out."""

    def load_state_dict(self, state: IteratorState) -> None:
        """Go on after the batch at which `state` was taken."""

    def close(self) -> None:
        """Stop what produces the batches."""


class DistributedDataset(ABC):
    """A dataset as a strategy hands it out. It has no transformations; every `iter()` is a new epoch of it.

    Made by `Strategy.distribute_dataset` and `Strategy.distribute_datasets_from_function`. On several replicas each
    leaf of a batch is a :class:`PerReplica` of their parts, on one device a plain tensor. `InputOptions.split` says how
    a global batch of b rows is cut for N replicas: by default into parts of ceil(b / N) rows, later ones shorter.

    Args:
        datasets: What it is made from: one dataset of global batches, or one of elements per input pipeline.
        options: How it is distributed.

    >>> strategy = rd.OneDeviceStrategy("cpu")
    >>> view = strategy.distribute_dataset(rd.Dataset.range(4).batch(2))  # 2 rows over all replicas
    >>> [strategy.run(lambda x: x + 1, args=(batch,)).tolist() for batch in view]
    [[1, 2], [3, 4]]

    Source: tf.distribute.DistributedDataset.
    """

    def __init__(self, datasets: Sequence[Dataset], options: InputOptions) -> None:
        self._datasets = tuple(datasets)
        self._options = options
        self._epochs = Epochs(self._datasets[0].options().seed)

    @property
    def options(self) -> InputOptions:
        """How it is distributed.

        >>> view = rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(4).batch(2))
        >>> view.options == rd.InputOptions()
        True

        Source: the `options` of tf.distribute.Strategy.experimental_distribute_dataset.
        """
        return self._options

    @property
    @abstractmethod
    def element_spec(self) -> Any:
        """Nest of TensorSpec of one replica's part of a batch; None stands for a length that is not always the same.

        It may run a user's function on one element to learn what it returns, as `Dataset.element_spec` does.

        >>> view = rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(4).batch(2, drop_remainder=True))
        >>> view.element_spec
        TensorSpec(shape=(2,), dtype=int64)

        Source: tf.distribute.DistributedDataset.element_spec.
        """

    def cardinality(self) -> int:
        """Number of batches: that of the dataset it was made from (of the first one, where there are several).

        Returns:
            The number, or `rd.INFINITE_CARDINALITY` or `rd.UNKNOWN_CARDINALITY`, which are negative.

        >>> rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(5).batch(2)).cardinality()
        3

        Source: tf.data.Dataset.cardinality.
        """
        return self._datasets[0].cardinality()

    @abstractmethod
    def _open_epoch(self, epoch: int, position: IteratorState | None = None) -> ResumableIterator:
        """An iterator over an epoch, of the seed that all have; it gets `position` as its state afterwards."""

    @final
    def __iter__(self) -> ResumableIterator:
        """A new epoch, or the rest of the restored one. Returns at once: nothing runs before the first batch.

        Returns:
            A :class:`DistributedIterator`; on one device a :class:`DatasetIterator`, which has the same methods.

        Source: tf.distribute.DistributedDataset.

        >>> view = rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(4).batch(2))
        >>> iterator = iter(view)
        >>> next(iterator).tolist(), iterator.get_next().tolist()
        ([0, 1], [2, 3])
        >>> iterator.close()
        """
        iterator: ResumableIterator = self._epochs.begin(self._open_epoch)
        return iterator

    @final
    def state_dict(self) -> dict[str, Any]:
        """Which epochs have begun, of which seed, and where the last of them is: for `rd.Checkpoint`.

        An iterator that was closed, dropped or read to its end has ended. Waits as `state_dict` of that iterator.

        Returns:
            A JSON-able dict. It fits any number of replicas.

        >>> view = rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(4).batch(2))
        >>> iterator = iter(view)
        >>> batch, state = next(iterator), view.state_dict()
        >>> state["epochs"]
        1

        Source: a tf.data iterator in tf.train.Checkpoint; the name is that of torch's modules.
        """
        return self._epochs.state()

    @final
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another distributed dataset was: the next `iter` gives the rest of its epoch.

        Where the end of that epoch was not seen but nothing is left of it, the rest is empty. Iterators of this dataset
        that live already stay as they are.

        Args:
            state: From `state_dict` of a distributed dataset of the same pipeline, on any number of replicas.

        Raises:
            InvalidArgumentError: It is no such state, or one of another pipeline; nothing has changed then.

        >>> view = rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(4).batch(2))
        >>> iterator = iter(view)
        >>> first, state = next(iterator), view.state_dict()
        >>> view.load_state_dict(state)
        >>> [batch.tolist() for batch in view]
        [[2, 3]]

        Source: a tf.data iterator in tf.train.Checkpoint; the name is that of torch's modules.
        """
        self._epochs.restore(state, lambda epoch: self._open_epoch(epoch, state["position"]))

    @final
    def stats(self) -> PipelineStats:
        """What the input pipeline of the last iterator did, and which stage limits the others; see `Dataset.stats`.

        Waits up to `Timeouts.start_s` for an answer.

        Returns:
            The numbers since that iterator began; `str()` of them is a table. Empty where it is gone.

        Raises:
            UnavailableError: The input pipeline is gone.

        >>> view = rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(4).batch(2))
        >>> view.stats().elements
        0

        Source: tf.data.experimental.StatsAggregator.
        """
        found: PipelineStats | None = self._epochs.stats()
        return PipelineStats() if found is None else found

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise FailedPreconditionError(
            f"A distributed dataset must stay in the process that made it, but this {type(self).__name__} was to be "
            "pickled or copied: its batches are for the replicas of one strategy. In a step, loop over an iterator: "
            "strategy.run(step, args=(iter(dataset),)). Elsewhere, distribute the rd.Dataset again."
        )

    @property
    def _has_rest(self) -> bool:
        """Whether the next `iter` gives the rest of a restored epoch, which may be empty."""
        return self._epochs.has_rest

    def _is_read_by(self, iterator: Any) -> bool:
        """Whether its last epoch is read by this iterator."""
        return self._epochs.is_read_by(iterator)

    def _state_with(self, position: dict[str, Any] | None) -> dict[str, Any]:
        """Its state where that iterator is there. Waits for nothing."""
        return self._epochs.state_with(position)

    def _note_run(self, boundary: int | None = None) -> None:
        """A step begins at this boundary, with all that was drawn."""
        self._epochs.mark(boundary)

    @property
    def _first_undoable(self) -> int:
        """The first boundary to which `_before_draw` can go back."""
        return self._epochs.first_undoable

    def _before_draw(self, undone: int | None = None) -> AbstractContextManager[None]:
        """Inside, what was drawn since the last step began (before this boundary) counts as not drawn."""
        return self._epochs.before_draw(undone)
