"""The piece of a replica's next step, fetched and copied by a thread while the replica works on the present one.

A small piece of a group that is mapped already is copied where it is asked for: the thread would cost more.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from raydist.actors.passes.batch_group import StepBatch
    from raydist.actors.readers.step_reader import ReadPlace, StepReader

__all__ = ["FetchAhead"]


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
