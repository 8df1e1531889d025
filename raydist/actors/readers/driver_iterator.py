"""The driver's reading end of a distributed dataset: batches as references, one part per replica."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, final

from raydist.actors.readers.batch_iterator import BatchIterator
from raydist.actors.readers.replica_iterator import ReplicaIterator
from raydist.actors.readers.step_reader import StepReader
from raydist.errors import CancelledError, FailedPreconditionError
from raydist.foreign_errors import what_was_raised
from raydist.nest import unflatten
from raydist.owning_process import OwningProcess
from raydist.pipelines.elements.saved_state import require_state
from raydist.pipelines.metering.stats import PipelineStats
from raydist.values import Part, PerReplica

if TYPE_CHECKING:
    from raydist.actors.passes.batch_group import StepBatch
    from raydist.actors.passes.job import InputJob
    from raydist.actors.passes.link import PipelineLink
    from raydist.actors.readers.step_reader import ReadPlace
    from raydist.pipelines.elements.items import State

__all__ = ["BatchLeaf", "DistributedIterator", "PassOpener"]


class PassOpener(Protocol):
    """Starts passes over datasets: `actors.passes.link.InputHost`."""

    def open(self, job: InputJob) -> PipelineLink:
        """Begin the pass that `job` describes."""


@final
class BatchLeaf(PerReplica):
    """One leaf of a distributed batch. The parts lie in the object store, where the replicas map them."""

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

    def part_on(self, rank: int, *, stand_in: bool = False) -> Part:
        batch = self.batch
        place = batch.place_on(rank, stand_in=stand_in)
        return Part(ref=batch.group.refs[rank], leaf_index=self.index, place=place)

    def _fetch(self) -> tuple[Any, ...]:
        batch = self.batch
        return tuple(self._link.fetch(ref).leaf(self.index, batch.place) for ref in batch.group.refs)


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
        self, opener: PassOpener, job: InputJob, *, find_spec: Callable[[], Any], drain: Callable[[], None]
    ) -> None:
        self._find_spec = find_spec
        self._opener = opener
        self._job = job
        self._drain = drain
        self._link: PipelineLink | None = None
        self._reader: StepReader | None = None
        self._finalizer: weakref.finalize[[], DistributedIterator] | None = None
        self._state: State | None = job.state
        self._lent = False
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
        link = self._require_link()
        structure = batch.group.structure
        return unflatten(structure, [BatchLeaf(batch, index, link) for index in range(structure.num_leaves)])

    def _read(self) -> ReadPlace:
        self._open()
        self._take_back()
        if self._reader is None:
            raise FailedPreconditionError(f"raydist bug: {self._job.label} is open and must have a reader, got none.")
        self._require_open()  # another thread may have closed it before the pass was open,
        place = self._reader.next_place()
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
        if self._link is None:
            self._link = self._opener.open(replace(self._job, state=self._state))
            self._finalizer = weakref.finalize(self, self._link.abandon)
            self._finalizer.atexit = False  # the actor dies with this process
            self._reader = self._reader_from(0)

    def _require_link(self) -> PipelineLink:
        if self._link is None:
            raise FailedPreconditionError(f"raydist bug: {self._job.label} must have been opened, got no pass.")
        return self._link

    def _reader_from(self, start: int) -> StepReader:
        return StepReader(self._require_link(), rank=None, start=start)

    def _finish(self, place: ReadPlace) -> None:
        """Stop the pass; pieces of earlier batches live on in the store."""
        self._last = place
        self._release()

    def _release(self) -> None:
        self._reader = None
        self._end_pass()

    def _end_pass(self) -> None:
        if self._finalizer is not None and self._finalizer.detach() is not None:
            self._require_link().close()

    def __reduce__(self) -> tuple[Any, ...]:
        """To the replicas goes their own reading end; the driver gives back what it read ahead."""
        with self._lock:
            if self._last is not None:
                return ReplicaIterator, (None,)
            self._open()
            self._lend()
            return ReplicaIterator, (self._link,)

    def _lend(self) -> None:
        if self._reader is not None:
            self._reader.give_back("lend")
        else:
            self._require_link().call("lend", 0)  # lent already: one more loop will follow the one under way
        self._reader = None
        self._lent = True

    def _take_back(self) -> None:
        """After a loop in the replicas: go on where they stopped."""
        if not self._lent or self._link is None:
            return
        self._drain()
        position = self._link.reclaim()
        self._state = position.state
        self._reader = self._reader_from(position.number)
        self._lent = False

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
        if self._link is None or self._closed:
            return PipelineStats()
        try:
            stats: PipelineStats = self._link.call("stats")
        except CancelledError:  # the replicas have read the end
            return PipelineStats()
        return stats

    def state_dict(self) -> State:
        """State after the last batch handed out, here or in the replicas.

        Waits for dispatched steps, which may read batches, and up to `Timeouts.start_s` for the pipeline.

        Returns:
            A JSON-able dict. It fits any number of replicas and input workers.

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
                self._state = self._require_link().reclaim().state
            return dict(self._state)

    def load_state_dict(self, state: State) -> None:
        """Go on after the batch at which `state` was taken, on any number of replicas and input workers.

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
            if self._lent:
                self._drain()
            self._release()
            self._link, self._last, self._lent, self._closed = None, None, False, False
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
        self._end_pass()  # a thread that waits for a batch gets an error now
        with self._lock:
            self._release()
