"""The driver's iterator over a distributed dataset: batches are references, one part per replica.

An epoch is opened on first use, lent to the replicas, taken back, and ended.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

from raydist.actors.readers.batch_iterator import BatchIterator
from raydist.actors.readers.replica_iterator import ReplicaIterator
from raydist.actors.readers.step_reader import StepReader
from raydist.core.errors import CancelledError, FailedPreconditionError
from raydist.core.exception_utils import folded, what_was_raised
from raydist.core.fork_guard import OwningProcess
from raydist.core.nest import unflatten
from raydist.core.values import Part, PerReplica
from raydist.pipelines.elements.saved_state import require_state
from raydist.pipelines.metering.stats import PipelineStats

if TYPE_CHECKING:
    from raydist.actors.epochs.batch_group import StepBatch
    from raydist.actors.epochs.job import InputJob, MergedJob
    from raydist.actors.epochs.link import PipelineLink
    from raydist.actors.readers.step_reader import ReadPlace
    from raydist.pipelines.elements.items import IteratorState


class EpochOpener(Protocol):
    """The interface that starts epochs over datasets: `actors.epochs.input_pipeline_actors.InputPipelineActors`."""

    def open(self, job: InputJob | MergedJob) -> PipelineLink:
        """Start the epoch that `job` describes."""


@final
class DriverEpoch:
    """An epoch and the driver's reader. The epoch ends with `end`, or when this object is collected. Not thread-safe.

    Args:
        opener: Starts the epoch.
        job: Describes the epoch.

    Attributes:
        lent: True while the replicas read the epoch; the driver must take it back before it reads on.
        num_loans: Number of times that the epoch was lent to the replicas.
        ended: True if the replicas have read the end.
    """

    def __init__(self, opener: EpochOpener, job: InputJob | MergedJob) -> None:
        self._opener = opener
        self._job = job
        self._link: PipelineLink | None = None
        self._reader: StepReader | None = None
        self._finalizer: weakref.finalize[[], DriverEpoch] | None = None
        self.lent = False
        self.num_loans = 0
        self.ended = False

    @property
    def is_open(self) -> bool:
        return self._link is not None

    @property
    def link(self) -> PipelineLink:
        if self._link is None:
            raise FailedPreconditionError(f"raydist bug: {self._job.label} must have been opened, got no epoch.")
        return self._link

    @property
    def reader(self) -> StepReader:
        if self._reader is None:
            raise FailedPreconditionError(f"raydist bug: {self._job.label} is open and must have a reader, got none.")
        return self._reader

    def open(self, state: IteratorState | None) -> None:
        """Start the epoch at `state`, unless it has started. Blocks until the actor has it."""
        if self._link is None:
            self._link = self._opener.open(replace(self._job, state=state))
            self._finalizer = weakref.finalize(self, self._link.abandon)
            self._finalizer.atexit = False  # the actor dies with this process
            self._reader = self._reader_from(0)

    def _reader_from(self, start: int) -> StepReader:
        return StepReader(self.link, rank=None, start=start)

    def lend(self) -> None:
        """Lend the epoch to the replicas, and return the batches that the driver has read ahead."""
        if self._reader is not None:
            self._reader.give_back("lend")
        else:
            self.link.call("lend", 0)  # lent already: another loop follows the running one
        self._reader = None
        self.lent = True
        self.num_loans += 1

    def take_back(self) -> IteratorState:
        """Continue where the replicas stopped, and return the state there. The replicas must have stopped."""
        position = self.link.reclaim()
        self._reader = self._reader_from(position.number)
        self.lent = False
        self.ended = position.ended
        return position.state

    def end(self) -> None:
        """Stop the epoch, once; data that it has made stays in the object store. Any thread may call this."""
        if self._finalizer is not None and self._finalizer.detach() is not None:
            self.link.close()

    def release(self) -> None:
        """End the epoch and drop the reader."""
        self._reader = None
        self.end()

    def forget(self) -> None:
        """Release the epoch; the next `open` starts another epoch."""
        self.release()
        self._link, self.lent, self.ended = None, False, False


@final
class BatchLeaf(PerReplica):
    """One leaf of a distributed batch. The parts are in the object store, and replicas map them from there."""

    def __init__(self, batch: StepBatch, index: int, link: PipelineLink) -> None:
        super().__init__(())
        self._values = None
        self.batch = batch
        self.index = index
        self.rows = batch.rows
        self._link = link

    @property
    def num_parts(self) -> int:
        return len(self.batch.group.refs)

    def part_on(self, rank: int, *, padding: bool = False) -> Part:
        batch = self.batch
        place = batch.place_on(rank, padding=padding)
        return Part(ref=batch.group.refs[rank], leaf_index=self.index, place=place, on_host=self._link.on_host)

    def _fetch(self) -> tuple[Any, ...]:
        batch = self.batch
        places = [batch.place_on(rank, padding=False) for rank in range(self.num_parts)]
        pieces = map(self._link.fetch, batch.group.refs)
        return tuple(piece.leaf(self.index, place) for piece, place in zip(pieces, places, strict=True))


class _Place(NamedTuple):
    """The position of an iterator.

    Attributes:
        state: The iterator's state, as from `state_dict`.
        num_loans: Number of times that the iterator was lent to the replicas.
    """

    state: IteratorState | None
    num_loans: int


@final
class DistributedIterator(BatchIterator):
    """One epoch of a distributed dataset, read by the driver, or by replicas if passed to `strategy.run`.

    Nothing runs before the first batch is requested. The epoch ends with the data, with :meth:`close`, or when the
    iterator is collected. Threads may share the iterator: each batch goes to exactly one thread.

    Made by `iter()` of a :class:`DistributedDataset`. On one device `iter()` returns a
    :class:`DatasetIterator`, which has the same methods; the examples here use it.

    Args:
        opener: Starts the epoch on the input pipeline.
        job: Describes the epoch.
        find_spec: Returns the nest of TensorSpec of one replica's part.
        drain: Waits until every dispatched step is done, because replicas may be reading this iterator.

    >>> strategy = rd.OneDeviceStrategy("cpu")
    >>> iterator = iter(strategy.distribute_dataset(rd.Dataset.range(6).batch(2)))
    >>> [strategy.run(lambda x: x.sum().item(), args=(next(iterator),)) for _ in range(2)]
    [1, 5]
    >>> strategy.run(lambda batches: next(batches), args=(iterator,))  # several steps in one call: read it in there
    tensor([4, 5])

    Source: tf.distribute.DistributedIterator.
    """

    def __init__(
        self, opener: EpochOpener, job: InputJob | MergedJob, *, find_spec: Callable[[], Any], drain: Callable[[], None]
    ) -> None:
        self._find_spec = find_spec
        self._job = job
        self._drain = drain
        self._epoch = DriverEpoch(opener, job)
        self._state: IteratorState | None = job.state
        self._last: ReadPlace | None = None
        self._closed = False
        self._lock = threading.RLock()
        self._process = OwningProcess("This iterator")

    @property
    def element_spec(self) -> Any:
        """The nest of TensorSpec of one replica's part of a batch: see `DistributedDataset.element_spec`.

        >>> iterator = iter(rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(2).batch(2)))
        >>> iterator.element_spec
        TensorSpec(shape=(None,), dtype=int64)

        Source: tf.distribute.DistributedIterator.element_spec.
        """
        return self._find_spec()

    @folded
    def __next__(self) -> Any:
        """Return the next batch. Blocks for at most `Timeouts.input_s`.

        Returns:
            A nest with the structure of the dataset's elements, each leaf a :class:`PerReplica` with references: rows
            stay in the object store until a replica, or `values` of a leaf, fetches them.

        Raises:
            StopIteration: The data has ended.
            Exception: The error of this batch, with its type; the next call returns the batch after it.
            DeadlineExceededError: The batch did not come in time.
            FailedPreconditionError: The iterator was closed.
            UnavailableError: The input pipeline or one of its workers is gone; the message names the process.

        >>> next(iter(rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(2).batch(2))))
        tensor([0, 1])

        Source: tf.distribute.DistributedIterator.
        """
        self._process.require("read")
        with self._lock:
            place = self._last or self._read()
            self._state = place.state or self._state
            if place.last:
                self._finish(place)
        if place.entry.error is not None:
            raise what_was_raised(place.entry.error.restore())
        if place.batch is None:
            raise StopIteration
        return self._nest(place.batch)

    def _nest(self, batch: StepBatch) -> Any:
        link = self._epoch.link
        structure = batch.group.structure
        return unflatten(structure, [BatchLeaf(batch, index, link) for index in range(structure.num_leaves)])

    def _read(self) -> ReadPlace:
        self._open()
        self._take_back()
        self._require_open()  # another thread may have closed the iterator before the epoch was open,
        place = self._epoch.reader.next_place()
        if place.entry.error is None:
            self._require_open()  # or in the meantime
        return place

    def _require_open(self) -> None:
        if self._closed:
            raise FailedPreconditionError(
                f"The iterator over {self._job.label} was closed and gives no more batches. Take a new one: "
                "iter(dataset)."
            )

    def _open(self) -> None:
        self._require_open()
        self._epoch.open(self._state)

    def _take_back(self) -> None:
        """Continue where the replicas stopped, after a loop in them. Blocks until dispatched steps end."""
        if self._epoch.lent:
            self._drain()
            self._state = self._epoch.take_back()

    def _finish(self, place: ReadPlace) -> None:
        """Stop the epoch; the data of earlier batches stays in the object store."""
        self._last = place
        self._epoch.release()

    def __reduce__(self) -> tuple[Any, ...]:
        """Reduce to a `ReplicaIterator` for the replicas; the driver returns the batches that it has read ahead."""
        with self._lock:
            if self._last is not None:
                return ReplicaIterator, (None,)
            self._open()
            self._epoch.lend()
            return ReplicaIterator, (self._epoch.link,)

    def stats(self) -> PipelineStats:
        """Return statistics of every stage of the pipeline in this epoch, and the bottleneck; see `Dataset.stats`.

        The consumer is the thread that puts batches into the object store, ahead of the replicas. Blocks for at most
        `Timeouts.start_s`. Empty if the iterator was closed, or the replicas have read the end.

        Returns:
            The numbers since the start of the epoch; `str()` of them is a table.

        Raises:
            UnavailableError: The input pipeline is gone.
            DeadlineExceededError: The input pipeline does not answer.

        >>> iterator = iter(rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(2).batch(2)))
        >>> batch = next(iterator)
        >>> [(stage.name, stage.elements) for stage in iterator.stats().stages][0]
        ('range-0', 2)
        >>> iterator.close()

        Source: tf.data.experimental.StatsAggregator; the shape of the summary is grain's execution summary.
        """
        if self._last is not None:
            return self._last.entry.stats or PipelineStats()
        if not self._epoch.is_open or self._closed:
            return PipelineStats()
        try:
            stats: PipelineStats = self._epoch.link.call("stats")
        except CancelledError:  # the replicas have read the end
            return PipelineStats()
        return stats

    @property
    def has_ended(self) -> bool:
        """Return True if the driver or the replicas have read the end, or it was closed. Blocks while replicas read.

        >>> iterator = iter(rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(2).batch(2)))
        >>> _ = list(iterator)
        >>> iterator.has_ended
        True

        Source: raydist's own; for code that saves a position.
        """
        with self._lock:
            if self._last is None and not self._closed:
                self._take_back()
            return self._last is not None or self._closed or self._epoch.ended

    def _place(self) -> _Place | None:
        """Return the position, at no cost; None if no batch was handed out yet."""
        with self._lock:
            num_loans = self._epoch.num_loans
            return _Place(self._state, num_loans) if self._state is not None or num_loans else None

    def _state_at(self, place: _Place) -> IteratorState:
        """Return the state at a position, or the present state if the replicas have read batches since then."""
        state, num_loans = place
        return self.state_dict() if state is None or num_loans != self._epoch.num_loans else dict(state)

    def state_dict(self) -> IteratorState:
        """Return the state after the last batch handed out, on the driver or in the replicas.

        Blocks until dispatched steps end, which may read batches, and up to `Timeouts.start_s` for the pipeline.

        Returns:
            A JSON-able dict. It fits any number of replicas, nodes and input workers; if workers read data of their own
            (`AutoShardPolicy.FILE` and `OFF`, datasets from a function), only the same number of pipelines.

        Raises:
            FailedPreconditionError: The iterator was closed before the first batch.
            UnavailableError: The input pipeline is gone.

        >>> iterator = iter(rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(4).batch(2)))
        >>> batch = next(iterator)
        >>> import json
        >>> text = json.dumps(iterator.state_dict())

        Source: a tf.data iterator in tf.train.Checkpoint; the name is that of torch's modules.
        """
        self._process.require("saved")
        with self._lock:
            self._take_back()
            if self._state is None:
                self._open()
                self._state = self._epoch.link.reclaim().state
            return dict(self._state)

    def load_state_dict(self, state: IteratorState) -> None:
        """Continue after the batch at which `state` was taken; see `state_dict` for compatible states.

        Drops the iterator's present position. Blocks until dispatched steps that read the iterator end. The epoch
        starts with the next batch, which also raises the error of a state that does not fit.

        Args:
            state: From `state_dict` of an iterator over the same dataset.

        >>> view = rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(4).batch(2))
        >>> first, second = iter(view), iter(view)
        >>> batch = next(first)
        >>> second.load_state_dict(first.state_dict())
        >>> next(second)
        tensor([2, 3])

        Source: a tf.data iterator in tf.train.Checkpoint; the name is that of torch's modules.
        """
        self._process.require("loaded")
        require_state(state)
        with self._lock:
            if self._epoch.lent:
                self._drain()
            self._epoch.forget()
            self._last, self._closed = None, False
            self._state = dict(state)

    def close(self) -> None:
        """End the epoch and stop the pipeline's work for it. Does not block. Idempotent; a later `next` raises.

        >>> iterator = iter(rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(4).batch(2)))
        >>> batch = next(iterator)
        >>> iterator.close()

        Source: raydist's own; a tf.data iterator ends when it is collected.
        """
        self._process.require("closed")
        self._closed = self._last is None
        self._epoch.end()  # a thread that waits for a batch gets an error now
        with self._lock:
            self._epoch.release()
