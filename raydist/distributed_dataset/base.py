"""The interface of distributed datasets: batches with one part per replica. Has no transformations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self, final

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.distributed_dataset.epochs import Epochs
from raydist.options import InputOptions
from raydist.pipelines.metering.stats import PipelineStats
from raydist.pipelines.run.optional import Optional

if TYPE_CHECKING:
    from raydist.dataset import Dataset
    from raydist.pipelines.elements.items import IteratorState


def require_shared(options: InputOptions) -> None:
    """Raise InvalidArgumentError for options that need a pipeline per replica, if one dataset serves all replicas."""
    if options.per_replica:
        raise InvalidArgumentError(
            "per_replica (InputReplicationMode.PER_REPLICA) is for distribute_datasets_from_function, whose function "
            f"is then called once per replica, but one dataset was given with {options}. Leave it out, or use that "
            "method."
        )


def require_batches(dataset: Dataset) -> None:
    """Raise InvalidArgumentError for a dataset that was never batched: replicas would split the features of a row.

    If a user's function may have made batches, this cannot be known, and the dataset is accepted.
    """
    if dataset._op.gives_rows:
        raise InvalidArgumentError(
            "A dataset must be batched by the global batch size before it is distributed, got the rows of "
            f"{dataset!r}. Call .batch(global_batch_size) on it. If its rows are batches already, say so with a map "
            "that returns them."
        )


class ResumableIterator(Protocol):
    """The iterator of a distributed dataset, independent of the producer of the batches."""

    @property
    def element_spec(self) -> Any:
        """Nest of TensorSpec of one replica's part of a batch."""

    def __iter__(self) -> Self: ...

    def __next__(self) -> Any: ...

    def get_next(self) -> Any:
        """Return the next batch like `next`, but raise OutOfRangeError at the end."""

    def get_next_as_optional(self) -> Optional[Any]:
        """Return the next batch, or an empty Optional at the end."""

    def state_dict(self) -> IteratorState:
        """Return the JSON-able state after the last batch returned."""

    def load_state_dict(self, state: IteratorState) -> None:
        """Continue after the batch at which `state` was taken."""

    def close(self) -> None:
        """Stop the producers of the batches."""


class DistributedDataset(ABC):
    """A dataset as distributed by a strategy. It has no transformations; every `iter()` is a new epoch.

    Created by `Strategy.distribute_dataset` and `Strategy.distribute_datasets_from_function`. On several replicas each
    leaf of a batch is a :class:`PerReplica` of parts, on one device a plain tensor. `InputOptions.split` determines how
    a global batch of b rows is divided among N replicas: by default into parts of ceil(b / N) rows, later ones shorter.

    Args:
        datasets: One dataset of global batches, or one dataset of elements per input pipeline.
        options: Options of the distribution.

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
        """The options of the distribution.

        >>> view = rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(4).batch(2))
        >>> view.options == rd.InputOptions()
        True

        Source: the `options` of tf.distribute.Strategy.experimental_distribute_dataset.
        """
        return self._options

    @property
    @abstractmethod
    def element_spec(self) -> Any:
        """Nest of TensorSpec of one replica's part of a batch; None for a length that varies.

        May call a user's function on one element to learn its result's type, as `Dataset.element_spec` does.

        >>> view = rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(4).batch(2, drop_remainder=True))
        >>> view.element_spec
        TensorSpec(shape=(2,), dtype=int64)

        Source: tf.distribute.DistributedDataset.element_spec.
        """

    def cardinality(self) -> int:
        """Return the number of batches: the cardinality of the underlying dataset (the first, if there are several).

        Returns:
            The number, or `rd.INFINITE_CARDINALITY` or `rd.UNKNOWN_CARDINALITY`, which are negative.

        >>> rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(5).batch(2)).cardinality()
        3

        Source: tf.data.Dataset.cardinality.
        """
        return self._datasets[0].cardinality()

    @abstractmethod
    def _open_epoch(self, epoch: int, position: IteratorState | None = None) -> ResumableIterator:
        """Return an iterator over an epoch, with the common seed. The caller then sets `position` as its state."""

    @final
    def __iter__(self) -> ResumableIterator:
        """Begin a new epoch, or continue the restored one. Does not block: nothing runs before the first batch.

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
        """Return the number of epochs begun, their seed, and the position of the last epoch, for `rd.Checkpoint`.

        An iterator that was closed, dropped or read to its end has ended. Blocks as `state_dict` of that iterator does.

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
        """Continue at the position of another distributed dataset: the next `iter` returns the rest of its epoch.

        If the end of that epoch was not seen but nothing is left, the rest is empty. Existing iterators of this dataset
        do not change.

        Args:
            state: Result of `state_dict` of a distributed dataset of the same pipeline, on any number of replicas.

        Raises:
            InvalidArgumentError: The state is invalid, or of another pipeline; nothing has changed.

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
        """Return statistics of the last iterator's input pipeline, with the limiting stage; see `Dataset.stats`.

        Blocks for up to `Timeouts.start_s`.

        Returns:
            Statistics since that iterator began; `str()` of them is a table. Empty if the iterator is gone.

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
        """True if the next `iter` returns the rest of a restored epoch, which may be empty."""
        return self._epochs.has_rest

    def _is_read_by(self, iterator: Any) -> bool:
        """Return True if this iterator reads the last epoch."""
        return self._epochs.is_read_by(iterator)

    def _state_with(self, position: dict[str, Any] | None) -> dict[str, Any]:
        """Return the state with this position of the last iterator. Does not block."""
        return self._epochs.state_with(position)

    def _note_run(self, boundary: int | None = None) -> None:
        """Record the position at this boundary: a step begins, with all batches drawn so far."""
        self._epochs.mark(boundary)

    @property
    def _first_undoable(self) -> int:
        """The first boundary to which `_before_draw` can go back."""
        return self._epochs.first_undoable

    def _before_draw(self, undone: int | None = None) -> AbstractContextManager[None]:
        """Count batches drawn since the last step began (before this boundary) as not drawn during the `with` block."""
        return self._epochs.before_draw(undone)
