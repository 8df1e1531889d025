"""The interface of distributed datasets: batches with one part per replica. Has no transformations.

A distributed dataset remembers the epochs that it has begun, and the position of the last one, for resuming.
"""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self, final

from raydist.cluster.preemption import Positions
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.pipelines.elements.seeds import draw_seed
from raydist.pipelines.metering.stats import PipelineStats

if TYPE_CHECKING:
    from raydist.dataset import Dataset
    from raydist.options import InputOptions
    from raydist.pipelines.elements.items import IteratorState
    from raydist.pipelines.run.optional import Optional

_VERSION = 1


@final
class Epochs:
    """The epochs of one dataset: the number of epochs begun, their seed, and the position of the last one.

    Inside :meth:`before_draw`, batches drawn for a step that did not begin count as not drawn.

    Args:
        given_seed: The program's seed; None to draw a seed when it is first needed.
    """

    def __init__(self, given_seed: int | None) -> None:
        self._seed = given_seed
        self._begun = 0
        self._began_at: tuple[int, dict[str, Any] | None] = 0, None  # state that was restored when the last epoch began
        self._resumed: ResumableIterator | None = None  # continues where another process stopped
        self._last: weakref.ref[ResumableIterator] | None = None
        self._positions = Positions()  # of the last iterator
        self._boundary = 0  # the last boundary
        self._first_boundary = 1  # of the last iterator
        self._undone: int | None = None

    @property
    def seed(self) -> int:
        """The seed of all epochs, so that an order without reshuffling stays the same."""
        if self._seed is None:
            self._seed = draw_seed()
        return self._seed

    def begin(self, open_epoch: Callable[[int], Any]) -> Any:
        """Return the iterator of the next epoch: the rest of the restored epoch, or a new epoch."""
        iterator, self._resumed = self._resumed, None
        if iterator is None:
            self._began_at = self._begun, None
            iterator = open_epoch(self._begun)
            self._begun += 1
        else:
            self._began_at = self._begun, iterator.state_dict()
        self._last = weakref.ref(iterator)
        self._forget_marks()
        return iterator

    def _forget_marks(self) -> None:
        self._positions = Positions()
        self._first_boundary = self._boundary + 1

    def stats(self) -> Any:
        """Return statistics of the last iterator's pipeline; None if the iterator is gone."""
        iterator = None if self._last is None else self._last()
        return None if iterator is None else iterator.stats()

    def _current(self) -> ResumableIterator | None:
        iterator = None if self._last is None else self._last()
        return None if iterator is None or iterator.has_ended else iterator

    def mark(self, boundary: int | None = None) -> None:
        """Record the position at this boundary (None: the next one): a step begins, with all batches drawn so far."""
        self._boundary = self._boundary + 1 if boundary is None else boundary
        iterator = None if self._last is None else self._last()
        self._positions.note(self._boundary, None if iterator is None else iterator._place())

    @property
    def first_undoable(self) -> int:
        """The first boundary to which `before_draw` can go back."""
        return (self._positions.first or 0) + 1 if self._positions.num_forgotten else self._first_boundary

    @contextlib.contextmanager
    def before_draw(self, undone: int | None = None) -> Iterator[None]:
        """Make `state` return the position of the last :meth:`mark` (before this boundary) in the `with` block."""
        self._undone = self._boundary + 1 if undone is None else undone
        try:
            yield
        finally:
            self._undone = None

    @property
    def has_rest(self) -> bool:
        """True if the next :meth:`begin` returns the rest of a restored epoch."""
        return self._resumed is not None

    def state(self) -> dict[str, Any]:
        """Return the JSON-able state for `restore`."""
        begun, position = self._position()
        return {"version": _VERSION, "seed": self.seed, "epochs": begun, "position": position}

    def is_read_by(self, iterator: Any) -> bool:
        """Return True for the iterator of the last epoch."""
        return self._last is not None and self._last() is iterator

    def state_with(self, position: dict[str, Any] | None) -> dict[str, Any]:
        """Return the state with this position of the last iterator; None for one that has ended."""
        return {"version": _VERSION, "seed": self.seed, "epochs": self._begun, "position": position}

    def _position(self) -> tuple[int, dict[str, Any] | None]:
        if self._resumed is not None:
            return self._begun, self._resumed.state_dict()
        iterator = self._current()
        if self._undone is not None and (iterator is not None or self._is_undone(self._undone)):
            return self._position_before(self._undone)
        return self._begun, None if iterator is None else iterator.state_dict()

    def _is_undone(self, boundary: int) -> bool:
        """Return True if undoing this boundary undoes a step with batches of the last iterator."""
        return boundary <= self._positions.last_change

    def _position_before(self, boundary: int) -> tuple[int, dict[str, Any] | None]:
        place = self._positions.before(boundary)
        iterator = None if self._last is None else self._last()
        if place is None and iterator is not None and is_lent(iterator):
            return self._begun, iterator.state_dict()
        if place is None:
            return self._began_at
        return self._begun, getattr(place, "state", None) if iterator is None else iterator._state_at(place)

    def restore(self, state: Mapping[str, Any], open_epoch: Callable[[int], Any]) -> None:
        """Restore the state of another dataset; the next :meth:`begin` continues its epoch.

        Raises:
            InvalidArgumentError: The state is invalid, or of another dataset. Nothing has changed.
        """
        seed, begun, position = _require_state(state)
        before = self._seed
        self._seed = seed
        try:
            resumed = None if position is None else open_epoch(max(0, begun - 1))
            if resumed is not None:
                resumed.load_state_dict(position)
        except BaseException:
            self._seed = before
            raise
        self._resumed, self._begun, self._last = resumed, begun, None
        self._forget_marks()


def is_lent(iterator: ResumableIterator) -> bool:
    """Return True if replicas draw from the iterator themselves: all batches that they drew were used."""
    return getattr(iterator._place(), "num_loans", 0) > 0


def _require_state(state: Any) -> tuple[int, int, dict[str, Any] | None]:
    if not isinstance(state, Mapping) or state.get("version") != _VERSION:
        version = state.get("version") if isinstance(state, Mapping) else state
        raise InvalidArgumentError(
            f"The state of a distributed dataset must be one of its state_dict(), version {_VERSION}, got "
            f"{version!r:.80}. Restore what a DistributedDataset saved under this name."
        )
    seed, begun, position = state.get("seed"), state.get("epochs"), state.get("position")
    counts = all(type(number) is int and 0 <= number < 2**64 for number in (seed, begun))
    if not counts or not isinstance(position, dict | None) or (position is not None and begun == 0):
        raise InvalidArgumentError(
            "The state of a distributed dataset must hold a seed, a number of epochs and the state of an iterator, got "
            f"seed {seed!r:.40}, epochs {begun!r:.40}, position {type(position).__name__}. It was changed since it was "
            "saved: restore another checkpoint."
        )
    return int(seed or 0), int(begun or 0), position


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

    @property
    def has_ended(self) -> bool:
        """True once the iterator has reached its end or was closed."""

    def stats(self) -> Any:
        """Return statistics of the iterator's pipeline."""

    def _place(self) -> Any:
        """Return the position without blocking; None if unknown. Its `state`, if any, outlives the iterator."""

    def _state_at(self, place: Any) -> dict[str, Any]:
        """Return the state of a position."""


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
