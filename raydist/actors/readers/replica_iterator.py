"""A distributed iterator inside a replica: it draws the replica's own pieces straight from the input pipeline.

A thread fetches the next pieces ahead. A small piece of a group that is mapped already is copied where it is asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Literal, final

from raydist.actors.passes.dealt_link import DealtLink
from raydist.actors.passes.piece import GroupPiece
from raydist.actors.readers.batch_iterator import BatchIterator
from raydist.actors.readers.step_reader import StepReader
from raydist.errors import FailedPreconditionError
from raydist.foreign_errors import what_was_raised
from raydist.nest import unflatten

if TYPE_CHECKING:
    from raydist.actors.passes.batch_group import StepBatch
    from raydist.actors.passes.batch_queues import Position
    from raydist.actors.passes.link import PipelineLink
    from raydist.actors.passes.piece import Ref
    from raydist.actors.readers.step_reader import ReadPlace, StepReader
    from raydist.pipelines.elements.items import IteratorState

__all__ = ["FetchAhead", "ReplicaIterator"]


@final
class FetchAhead:
    """Takes the places of a reader, one step ahead of who asks for them. The reader is used by nobody else meanwhile.

    Args:
        reader: Of one replica.
        fetch: Gives the leaves of this replica's piece of a step.
        is_quick: Whether that takes no longer than to wake a thread.
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
        """The next place, and the leaves of its step (none of an error or the end). See `StepReader.next_place`."""
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
        """Number and leaves of the next step, once it is there; None if it is no step, or not wanted any more."""
        try:
            self._reader.look_ahead()  # here: to send a question takes half a millisecond
            place = self._reader.await_place(stop)
            return None if place is None or place.batch is None else (place.number, self._fetch(place.batch))
        except Exception:  # whoever asks for this place meets it too, where it can be raised
            return None

    def close(self) -> StepReader:
        """Stop looking ahead, and give the reader back."""
        if not self._stop.done():
            self._stop.set_result(None)
        self._threads.shutdown()
        return self._reader


def _keep(value: Any) -> Any:
    return value


_Moves = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""What begins to bring a leaf to the device, and what ends it."""

_QUICK_BYTES = 256 << 10  # copied in 10 us; to hand over between threads takes 50 and more


def _ignore(batch: StepBatch) -> None:
    """Nobody asked for the batches."""


def _draw_freely() -> None:
    """Nothing ends here."""


@final
class ReplicaIterator(BatchIterator):
    """What a DistributedIterator becomes when it is sent to a replica.

    The replica's runner calls `bind` before the step function and `release` after it, whatever happened in between;
    both may be repeated. All replicas see the same number of steps.

    Args:
        link: The pass; None for one that has ended.
        held: Nobody else reads the pass: `release` does nothing, and the next `bind` goes on reading.

    Attributes:
        num_drawn: How many batches it has given.
    """

    def __init__(self, link: PipelineLink | DealtLink | None, *, held: bool = False) -> None:
        self._link: Any = link
        self._held = held
        self.num_drawn = 0
        self._mapped: tuple[Ref, Any] = None, None
        self._ahead: FetchAhead | None = None
        self._ended = link is None
        self._state: IteratorState | None = None
        self._lock = threading.Lock()  # threads of a step function may share it
        self._before_draw = _draw_freely
        self._bind(0, (_keep, _keep), _ignore, "stand_in")

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
        empty_batch: Literal["stand_in", "zero_rows"] = "stand_in",
        before_draw: Callable[[], None] = _draw_freely,
    ) -> None:
        """Begin to read for replica `rank`, where it stopped last time.

        Args:
            rank: The replica.
            begin: Applied to each leaf as soon as it is here, perhaps in another thread (starts to copy it).
            place: Applied to that when it is handed out (a tensor on the replica's device).
            on_batch: Told about each step before it is handed out: `rows` of all replicas, `step`.
            empty_batch: What a replica without rows is handed: two other rows of the global batch, or zero rows.
            before_draw: Called when a batch is asked for; what it raises is raised there.
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
        place = batch.place_on(self._rank, stand_in=self._empty_batch == "stand_in")
        leaves = link.leaves(self._mapped[1], place, batch.group.structure.num_leaves)
        return [self._begin(leaf) for leaf in leaves]

    def _is_quick(self, batch: StepBatch) -> bool:
        ref, piece = self._mapped
        known = ref is batch.group.refs[self._rank] and isinstance(piece, GroupPiece)
        return known and piece.num_bytes <= _QUICK_BYTES * batch.group.span(self._rank)[1]

    def _next_batch(self) -> tuple[StepBatch, list[Any]]:
        if self._ended:
            raise StopIteration
        if self._ahead is None and self._held:
            raise StopIteration  # until the next closure asks
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
            self._end_pass()
            raise StopIteration
        return place.batch, leaves

    def _end_pass(self) -> None:
        if isinstance(self._link, DealtLink):  # another worker may die, and what it had be left to this one
            self._ahead = None
        else:
            self._ended = True

    @property
    def has_ended(self) -> bool:
        """Whether its end was seen."""
        return self._ended

    def confirm(self, used: int) -> None:
        """So many batches of those drawn so far are used for good."""
        if isinstance(self._link, DealtLink):
            self._link.used = used

    def state_dict(self) -> IteratorState:
        """State after the last batch that this replica was handed, as `DistributedIterator.state_dict` gives it."""
        if self._state is None:
            raise FailedPreconditionError(
                f"The state of an iterator in a replica is known while it is read there; replica {self._rank} has "
                "not begun. Read it inside strategy.run, or ask the driver's iterator."
            )
        return dict(self._state)

    def release(self) -> None:
        """Stop reading for now and tell the pipeline how far this replica has come."""
        if not self._held:
            self._stop()

    def end(self) -> None:
        """Stop reading for good, and end the pass."""
        self._stop()
        if self._link is not None:
            self._link.close()

    def _stop(self) -> None:
        with self._lock:
            ahead, self._ahead = self._ahead, None
            self._mapped = None, None
        if ahead is not None:
            ahead.close().give_back("release", self._rank)
