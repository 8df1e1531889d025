"""The driver's iterator over a distributed dataset: batches are references, one part per replica."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, final

from raydist.actors.epochs.job import InputJob
from raydist.actors.readers.batch_iterator import BatchIterator
from raydist.actors.readers.driver_epoch import BatchLeaf, DrawnBatch, DriverEpoch, EpochOpener, EpochStart
from raydist.actors.readers.replica_iterator import ReplicaIterator
from raydist.core.errors import CancelledError, FailedPreconditionError, UnavailableError
from raydist.core.exception_utils import folded, what_was_raised
from raydist.core.fork_guard import OwningProcess
from raydist.core.nest import unflatten
from raydist.pipelines.elements.saved_state import require_state
from raydist.pipelines.metering.stats import PipelineStats

if TYPE_CHECKING:
    from raydist.actors.epochs.job import MergedJob
    from raydist.actors.readers.step_reader import ReadPlace
    from raydist.pipelines.elements.items import IteratorState

_log = logging.getLogger("raydist")


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
        restarts: Number of times that the input pipeline is started again for one batch, if it is lost.

    >>> strategy = rd.OneDeviceStrategy("cpu")
    >>> iterator = iter(strategy.distribute_dataset(rd.Dataset.range(6).batch(2)))
    >>> [strategy.run(lambda x: x.sum().item(), args=(next(iterator),)) for _ in range(2)]
    [1, 5]
    >>> strategy.run(lambda batches: next(batches), args=(iterator,))  # several steps in one call: read it in there
    tensor([4, 5])

    Source: tf.distribute.DistributedIterator.
    """

    def __init__(
        self,
        opener: EpochOpener,
        job: InputJob | MergedJob,
        *,
        find_spec: Callable[[], Any],
        drain: Callable[[], None],
        restarts: int = 0,
    ) -> None:
        self._find_spec = find_spec
        self._job = job
        self._drain = drain
        self._restarts = restarts
        self._epoch = DriverEpoch(opener, job, recovers=restarts > 0)
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
            before = self._state
            self._state = place.state or self._state
            if place.last:
                self._finish(place)
        if place.entry.error is not None:
            raise what_was_raised(place.entry.error.restore())
        if place.batch is None:
            raise StopIteration
        drawn = DrawnBatch(self._epoch.source, place.number, before, place.batch, self._epoch.link)
        structure = place.batch.group.structure
        return unflatten(structure, [BatchLeaf(drawn, index) for index in range(structure.num_leaves)])

    def _read(self) -> ReadPlace:
        self._open()
        self._take_back()
        self._require_open()  # another thread may have closed the iterator before the epoch was open,
        place = self._next_place()
        if place.entry.error is None:
            self._require_open()  # or in the meantime
        return place

    def _next_place(self) -> ReadPlace:
        """Return the next place of the epoch, which is started again if the input pipeline is lost."""
        for _ in range(self._restarts):
            try:
                return self._epoch.reader.next_place()
            except UnavailableError as error:
                if not self._epoch.link.is_lost():
                    raise
                self._epoch.forget()
                self._epoch.open(self._state)
                _log.warning("%s Another pipeline continues with the next batch.", str(error).partition(" Iterate")[0])
        return self._epoch.reader.next_place()

    def _require_open(self) -> None:
        if self._closed:
            raise FailedPreconditionError(
                f"The iterator over {self._job.label} was closed and gives no more batches. Take a new one: "
                "iter(dataset)."
            )

    def _require_recut(self) -> None:
        """Raise FailedPreconditionError if batches cannot be cut for another number of replicas within this epoch."""
        if not self._job.can_be_recut and self._epoch.is_open and not self.has_ended:
            raise FailedPreconditionError(
                f"The number of replicas may change within an epoch only if one pipeline makes whole batches, but "
                f"{self._job.label} has begun, and comes from a function or from workers that read separate parts. "
                "Resize between two epochs, and distribute the dataset again; or use AutoShardPolicy.DATA."
            )

    def _recut(self, num_replicas: int, num_workers: int) -> None:
        """Go on with batches for another number of replicas. All steps must have ended."""
        with self._lock:
            if not isinstance(self._job, InputJob) or not self._job.can_be_recut:
                return  # it has ended
            if self._last is None and not self._closed:
                self._take_back()
            self._job = self._job.recut(num_replicas, num_workers)
            self._epoch.recut(self._job)

    def _open(self) -> None:
        self._require_open()
        self._epoch.open(self._state)

    def _take_back(self) -> None:
        """Continue where the replicas stopped, after a loop in them. Blocks until dispatched steps end."""
        if self._epoch.lent:
            self._drain()
            self._state = self._epoch.take_back()

    def _reading(self) -> tuple[str | None, bool]:
        """Return the key of the epoch, None before it begins; and True if the replicas read it at present."""
        return self._epoch.link.key if self._epoch.is_open else None, self._epoch.lent

    def _start(self) -> EpochStart | None:
        """Return the present place, at which the replicas will begin to read; None at the end.

        Blocks until dispatched steps end that may read batches.
        """
        with self._lock:
            if self._last is not None or self._closed:
                return None
            self._open()
            state = self.state_dict()
            return EpochStart(self._epoch.link, state, weakref.ref(self))

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
