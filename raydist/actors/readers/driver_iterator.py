"""The driver's reading end of a distributed dataset: batches as references, one part per replica."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, final

from raydist.actors.readers.batch_iterator import BatchIterator
from raydist.actors.readers.batch_leaf import BatchLeaf
from raydist.actors.readers.driver_pass import DriverPass
from raydist.actors.readers.replica_iterator import ReplicaIterator
from raydist.errors import CancelledError, FailedPreconditionError
from raydist.foreign_errors import folded, what_was_raised
from raydist.nest import unflatten
from raydist.owning_process import OwningProcess
from raydist.pipelines.elements.saved_state import require_state
from raydist.pipelines.metering.stats import PipelineStats

if TYPE_CHECKING:
    from raydist.actors.passes.batch_group import StepBatch
    from raydist.actors.passes.job import InputJob, MergedJob
    from raydist.actors.readers.driver_pass import PassOpener
    from raydist.actors.readers.step_reader import ReadPlace
    from raydist.pipelines.elements.items import IteratorState

__all__ = ["DistributedIterator"]


class _Place(NamedTuple):
    """Where an iterator was.

    Attributes:
        state: As its `state_dict` gave it.
        num_loans: How often the replicas had read it.
    """

    state: IteratorState | None
    num_loans: int


@final
class DistributedIterator(BatchIterator):
    """One pass over a distributed dataset, read by the driver, or by the replicas when it is passed to `strategy.run`.

    Nothing runs before the first batch is asked for. The pass ends with the data, with :meth:`close`, or when the
    iterator is collected. Threads may share it: each batch goes to exactly one of them.

    Made by `iter()` of a :class:`DistributedDataset`. On one device `iter()` gives a
    :class:`DatasetIterator`, which has the same methods: it stands in the examples here.

    Args:
        opener: Starts the pass.
        job: The pass.
        find_spec: Gives the nest of TensorSpec of one replica's part.
        drain: Waits until every dispatched step is done: the replicas may be reading this iterator.

    >>> strategy = rd.OneDeviceStrategy("cpu")
    >>> iterator = iter(strategy.distribute_dataset(rd.Dataset.range(6).batch(2)))
    >>> [strategy.run(lambda x: x.sum().item(), args=(next(iterator),)) for _ in range(2)]
    [1, 5]
    >>> strategy.run(lambda batches: next(batches), args=(iterator,))  # several steps in one call: read it in there
    tensor([4, 5])

    Source: tf.distribute.DistributedIterator.
    """

    def __init__(
        self, opener: PassOpener, job: InputJob | MergedJob, *, find_spec: Callable[[], Any], drain: Callable[[], None]
    ) -> None:
        self._find_spec = find_spec
        self._job = job
        self._drain = drain
        self._pass = DriverPass(opener, job)
        self._state: IteratorState | None = job.state
        self._last: ReadPlace | None = None
        self._closed = False
        self._lock = threading.RLock()
        self._process = OwningProcess("This iterator")

    @property
    def element_spec(self) -> Any:
        """Nest of TensorSpec of one replica's part of a batch: see `DistributedDataset.element_spec`.

        >>> iterator = iter(rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(2).batch(2)))
        >>> iterator.element_spec
        TensorSpec(shape=(None,), dtype=int64)

        Source: tf.distribute.DistributedIterator.element_spec.
        """
        return self._find_spec()

    @folded
    def __next__(self) -> Any:
        """The next batch. Waits up to `Timeouts.input_s`.

        Returns:
            A nest as the dataset's elements are, each leaf a :class:`PerReplica`. It holds references: rows stay in the
            object store until a replica, or `values` of a leaf, asks for them.

        Raises:
            StopIteration: The data has ended.
            Exception: The error of the batch at this place, with its type; iteration goes on after it.
            DeadlineExceededError: The batch did not come in time.
            FailedPreconditionError: The iterator was closed.
            UnavailableError: The input pipeline or one of its workers is gone; names it.

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
        link = self._pass.link
        structure = batch.group.structure
        return unflatten(structure, [BatchLeaf(batch, index, link) for index in range(structure.num_leaves)])

    def _read(self) -> ReadPlace:
        self._open()
        self._take_back()
        self._require_open()  # another thread may have closed it before the pass was open,
        place = self._pass.reader.next_place()
        if place.entry.error is None:
            self._require_open()  # or meanwhile; else the pass has told so
        return place

    def _require_open(self) -> None:
        if self._closed:
            raise FailedPreconditionError(
                f"The iterator over {self._job.label} was closed and gives no more batches. Take a new one: "
                "iter(dataset)."
            )

    def _open(self) -> None:
        self._require_open()
        self._pass.open(self._state)

    def _take_back(self) -> None:
        """After a loop in the replicas: go on where they stopped."""
        if self._pass.lent:
            self._drain()
            self._state = self._pass.take_back()

    def _finish(self, place: ReadPlace) -> None:
        """Stop the pass; pieces of earlier batches live on in the store."""
        self._last = place
        self._pass.release()

    def __reduce__(self) -> tuple[Any, ...]:
        """To the replicas goes their own reading end; the driver gives back what it read ahead."""
        with self._lock:
            if self._last is not None:
                return ReplicaIterator, (None,)
            self._open()
            self._pass.lend()
            return ReplicaIterator, (self._pass.link,)

    def stats(self) -> PipelineStats:
        """What every stage of the pipeline did in this pass, and which of them limits the others; see `Dataset.stats`.

        The consumer is what puts the batches into the object store, as far ahead of the replicas as it may. Waits up to
        `Timeouts.start_s` for an answer. A pass that was closed, or whose end the replicas read, tells nothing.

        Returns:
            The numbers since the start of the pass; `str()` of them is a table.

        Raises:
            UnavailableError: The input pipeline is gone.
            DeadlineExceededError: It does not answer.

        >>> iterator = iter(rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(2).batch(2)))
        >>> batch = next(iterator)
        >>> [(stage.name, stage.elements) for stage in iterator.stats().stages][0]
        ('range-0', 2)
        >>> iterator.close()

        Source: tf.data.experimental.StatsAggregator; the shape of the summary is grain's execution summary.
        """
        if self._last is not None:
            return self._last.entry.stats or PipelineStats()
        if not self._pass.is_open or self._closed:
            return PipelineStats()
        try:
            stats: PipelineStats = self._pass.link.call("stats")
        except CancelledError:  # the replicas have read the end
            return PipelineStats()
        return stats

    @property
    def has_ended(self) -> bool:
        """Whether its end was seen, here or in the replicas, or it was closed. Waits for replicas that read it.

        >>> iterator = iter(rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(2).batch(2)))
        >>> _ = list(iterator)
        >>> iterator.has_ended
        True

        Source: raydist's own; for what saves a position.
        """
        with self._lock:
            if self._last is None and not self._closed:
                self._take_back()
            return self._last is not None or self._closed or self._pass.ended

    def _place(self) -> _Place | None:
        """Where it is, at no cost; None where no batch was handed out yet."""
        with self._lock:
            num_loans = self._pass.num_loans
            return _Place(self._state, num_loans) if self._state is not None or num_loans else None

    def _state_at(self, place: _Place) -> IteratorState:
        """The state of a place, or the present one where the replicas have read since: what they drew they used."""
        state, num_loans = place
        return self.state_dict() if state is None or num_loans != self._pass.num_loans else dict(state)

    def state_dict(self) -> IteratorState:
        """State after the last batch handed out, here or in the replicas.

        Waits for dispatched steps, which may read batches, and up to `Timeouts.start_s` for the pipeline.

        Returns:
            A JSON-able dict. It fits any number of replicas, nodes and input workers; where workers read data of their
            own (`AutoShardPolicy.FILE` and `OFF`, datasets from a function), as many pipelines.

        Raises:
            FailedPreconditionError: The iterator was closed before it gave a batch.
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
                self._state = self._pass.link.reclaim().state
            return dict(self._state)

    def load_state_dict(self, state: IteratorState) -> None:
        """Go on after the batch at which `state` was taken; `state_dict` says where it fits.

        What this iterator did before is given up. Waits for dispatched steps that read it; the pass itself begins, and
        errors of a state that does not fit are raised, with the next batch.

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
            if self._pass.lent:
                self._drain()
            self._pass.forget()
            self._last, self._closed = None, False
            self._state = dict(state)

    def close(self) -> None:
        """End the pass and stop what produces it. Does not wait. May be called twice; a later `next` raises.

        >>> iterator = iter(rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(4).batch(2)))
        >>> batch = next(iterator)
        >>> iterator.close()

        Source: raydist's own; a tf.data iterator ends when it is collected.
        """
        self._process.require("closed")
        self._closed = self._last is None
        self._pass.end()  # a thread that waits for a batch gets an error now
        with self._lock:
            self._pass.release()
