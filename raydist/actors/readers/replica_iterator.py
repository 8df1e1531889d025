"""A distributed iterator inside a replica, which fetches the replica's pieces of batches from the input pipeline.

A thread fetches the next piece ahead. A small piece of a group that is already mapped is copied on request instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Literal, final

from raydist.actors.epochs.link import DynamicShardingLink
from raydist.actors.epochs.piece import GroupPiece
from raydist.actors.readers.batch_iterator import BatchIterator
from raydist.actors.readers.step_reader import StepReader
from raydist.core.errors import FailedPreconditionError
from raydist.core.exception_utils import what_was_raised
from raydist.core.nest import unflatten

if TYPE_CHECKING:
    from raydist.actors.epochs.batch_group import StepBatch
    from raydist.actors.epochs.link import PipelineLink
    from raydist.actors.epochs.piece import Ref
    from raydist.actors.epochs.served_epoch import Position
    from raydist.actors.readers.step_reader import ReadPlace
    from raydist.pipelines.elements.items import IteratorState


@final
class FetchAhead:
    """A prefetcher of one step for a reader, which nothing else may use meanwhile.

    Args:
        reader: Reader of one replica.
        fetch: Returns the leaves of this replica's piece of a step.
        is_quick: Returns True if `fetch` takes no longer than waking a thread.
    """

    def __init__(
        self,
        reader: StepReader,
        fetch: Callable[[StepBatch], list[Any]],
        is_quick: Callable[[StepBatch], bool] = lambda batch: False,
    ) -> None:
        self._reader = reader
        self._fetch = fetch
        self._is_quick = is_quick
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="raydist-piece")  # started by the first step
        self._stop: Future[None] = Future()
        self._coming: Future[tuple[int, list[Any]] | None] | None = None

    def next_place(self) -> tuple[ReadPlace, list[Any]]:
        """Return the next place and the leaves of the step (empty for an error or the end). Blocks for the step."""
        self._reader.work_ends()
        fetched = self._await_coming()
        place = self._reader.take()
        leaves: list[Any] = []
        if place.batch is not None:
            leaves = fetched[1] if fetched and fetched[0] == place.number else self._fetch(place.batch)
        if not place.last:
            self._look_ahead()
        return place, leaves

    def _look_ahead(self) -> None:
        coming = self._reader.peek()
        if coming is None or (coming.batch is not None and not self._is_quick(coming.batch)):
            self._coming = self._threads.submit(self._look, self._stop)
        else:
            self._reader.look_ahead()

    def _await_coming(self) -> tuple[int, list[Any]] | None:
        coming, self._coming = self._coming, None
        if coming is None:
            return None
        try:
            return coming.result(self._reader.limit_s)
        except TimeoutError:
            self._stop.set_result(None)
            wait([coming])
            self._stop = Future()
            raise self._reader.late() from None

    def _look(self, stop: Future[None]) -> tuple[int, list[Any]] | None:
        """Wait for the next step and return its number and leaves; None for an error or the end, or after `stop`."""
        try:
            self._reader.look_ahead()  # in this thread: sending a poll takes half a millisecond
            place = self._reader.await_place(stop)
            return None if place is None or place.batch is None else (place.number, self._fetch(place.batch))
        except Exception:  # the caller's own fetch of this place raises it again
            return None

    def close(self) -> StepReader:
        """Stop prefetching, and return the reader."""
        if not self._stop.done():
            self._stop.set_result(None)
        self._threads.shutdown()
        return self._reader


def _keep(value: Any) -> Any:
    return value


_Moves = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""Functions that start and finish the copy of a leaf to the device."""

_QUICK_BYTES = 256 << 10  # copied in 10 us; a hand-over between threads takes 50 us and more


def _ignore(batch: StepBatch) -> None:
    """Do nothing: the default of `on_batch`."""


def _draw_freely() -> None:
    """Do nothing: the default of `before_draw`."""


@final
class ReplicaIterator(BatchIterator):
    """The form of a DistributedIterator in a replica.

    The replica's runner calls `bind` before the step function and `release` after it, even after an error; both may be
    repeated. All replicas see the same number of steps.

    Args:
        link: Link to the epoch; None for an epoch that has ended.
        held: True if only this replica reads the epoch: `release` does nothing, and the next `bind` continues.

    Attributes:
        num_drawn: Number of batches handed out.
    """

    def __init__(self, link: PipelineLink | DynamicShardingLink | None, *, held: bool = False) -> None:
        self._link: Any = link
        self._held = held
        self.num_drawn = 0
        self._mapped: tuple[Ref, Any] = None, None
        self._ahead: FetchAhead | None = None
        self._ended = link is None
        self._state: IteratorState | None = None
        self._lock = threading.Lock()  # threads of a step function may share the iterator
        self._before_draw = _draw_freely
        self._bind(0, (_keep, _keep), _ignore, "pad")

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplicaIterator, (self._link,)

    def _bind(self, rank: int, moves: _Moves, on_batch: Callable[[StepBatch], None], empty_batch: str) -> None:
        self._rank = rank
        on_host = self._link is not None and self._link.on_host
        self._begin, self._place = (_keep, _keep) if on_host else moves
        self._on_batch = on_batch
        self._empty_batch = empty_batch

    def bind(
        self,
        rank: int,
        *,
        begin: Callable[[Any], Any] = _keep,
        place: Callable[[Any], Any] = _keep,
        on_batch: Callable[[StepBatch], None] = _ignore,
        empty_batch: Literal["pad", "zero_rows"] = "pad",
        before_draw: Callable[[], None] = _draw_freely,
    ) -> None:
        """Start to read for replica `rank`, at the place where it last stopped.

        Args:
            rank: Rank of the replica.
            begin: Applied to each leaf once it is fetched, perhaps in another thread (starts a copy to the device).
            place: Applied to the result of `begin` when a batch is handed out (a tensor on the replica's device).
            on_batch: Called with each step before it is handed out: `rows` of all replicas, `step`.
            empty_batch: The batch for a replica without rows: padding rows ("pad") or zero rows.
            before_draw: Called when the program asks for a batch; may raise.
        """
        self._before_draw = before_draw
        self._bind(rank, (begin, place), on_batch, empty_batch)
        if self._link is not None and self._ahead is None:
            start: Position = self._link.call("position_of", rank)
            self._state = start.state
            reader = StepReader(self._link, rank=rank, start=start.number)
            self._ahead = FetchAhead(reader, self._leaves, self._is_quick)

    def __next__(self) -> Any:
        self._before_draw()
        with self._lock:
            batch, leaves = self._next_batch()
            self.num_drawn += 1
            self._on_batch(batch)
        return unflatten(batch.group.structure, [self._place(leaf) for leaf in leaves])

    def _leaves(self, batch: StepBatch) -> list[Any]:
        link, ref = self._link, batch.group.refs[self._rank]
        if link is None or ref is None:
            raise FailedPreconditionError(f"raydist bug: step {batch.step} came without replica {self._rank}'s piece.")
        if self._mapped[0] is not ref:
            self._mapped = ref, link.fetch(ref)
        place = batch.place_on(self._rank, padding=self._empty_batch == "pad")
        piece = self._mapped[1]
        return [self._begin(piece.leaf(index, place)) for index in range(batch.group.structure.num_leaves)]

    def _is_quick(self, batch: StepBatch) -> bool:
        ref, piece = self._mapped
        known = ref is batch.group.refs[self._rank] and isinstance(piece, GroupPiece)
        return known and piece.num_bytes <= _QUICK_BYTES * batch.group.span(self._rank)[1]

    def _next_batch(self) -> tuple[StepBatch, list[Any]]:
        if self._ended:
            raise StopIteration
        if self._ahead is None and self._held:
            raise StopIteration  # until the next closure binds the iterator
        if self._ahead is None:
            raise FailedPreconditionError(
                "A distributed iterator that was copied can be read inside strategy.run only; this "
                f"{type(self).__name__} is read outside of it. Pass it in args: strategy.run(step, args=(iterator,))."
            )
        place, leaves = self._ahead.next_place()
        self._state = place.state or self._state
        if place.entry.error is not None:
            raise what_was_raised(place.entry.error.restore())
        if place.batch is None:
            self._end_epoch()
            raise StopIteration
        return place.batch, leaves

    def _end_epoch(self) -> None:
        if isinstance(self._link, DynamicShardingLink):  # if another worker dies, this one may get its batches
            self._ahead = None
        else:
            self._ended = True

    @property
    def has_ended(self) -> bool:
        """Return True once the end of the data was read."""
        return self._ended

    def confirm(self, used: int) -> None:
        """Record that the first `used` batches need not be repeated if this worker dies."""
        if isinstance(self._link, DynamicShardingLink):
            self._link.used = used

    def state_dict(self) -> IteratorState:
        """Return the state after the last batch handed to this replica, as `DistributedIterator.state_dict` does."""
        if self._state is None:
            raise FailedPreconditionError(
                f"The state of an iterator in a replica is known while it is read there; replica {self._rank} has "
                "not begun. Read it inside strategy.run, or ask the driver's iterator."
            )
        return dict(self._state)

    def release(self) -> None:
        """Stop reading for now and send this replica's position to the pipeline."""
        if not self._held:
            self._stop()

    def end(self) -> None:
        """Stop reading for good, and end the epoch."""
        self._stop()
        if self._link is not None:
            self._link.close()

    def _stop(self) -> None:
        with self._lock:
            ahead, self._ahead = self._ahead, None
            self._mapped = None, None
        if ahead is not None:
            ahead.close().give_back("release", self._rank)
