"""The piece of a replica's next step, fetched and copied by a thread while the replica works on the present one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from raydist.actors.passes.batch_queues import QueueEntry
    from raydist.actors.passes.piece import StepBatch
    from raydist.actors.readers.step_reader import StepReader

__all__ = ["FetchAhead"]


@final
class FetchAhead:
    """Takes the entries of a reader, one step ahead of who asks for them. The reader is used by nobody else meanwhile.

    Args:
        reader: Of one replica.
        fetch: Gives the leaves of this replica's piece of a step.
    """

    def __init__(self, reader: StepReader, fetch: Callable[[StepBatch], list[Any]]) -> None:
        self._reader = reader
        self._fetch = fetch
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="raydist-piece")  # started by the first step
        self._stopped = threading.Event()
        self._coming: Future[tuple[int, list[Any]] | None] | None = None

    def next_entry(self) -> tuple[QueueEntry, list[Any]]:
        """The next entry, and the leaves of its step (none of an error or the end). See `StepReader.next_entry`."""
        fetched = self._await_coming()
        entry = self._reader.take()
        leaves: list[Any] = []
        if entry.batch is not None:
            leaves = fetched[1] if fetched and fetched[0] == entry.number else self._fetch(entry.batch)
        if not entry.last:
            self._coming = self._threads.submit(self._look)
        return entry, leaves

    def _await_coming(self) -> tuple[int, list[Any]] | None:
        coming, self._coming = self._coming, None
        if coming is None:
            return None
        try:
            return coming.result(self._reader.limit_s)
        except TimeoutError:
            self._stopped.set()
            wait([coming])
            self._stopped.clear()
            raise self._reader.late() from None

    def _look(self) -> tuple[int, list[Any]] | None:
        """Number and leaves of the next step, once it is there; None if it is no step, or not wanted any more."""
        try:
            self._reader.look_ahead()  # here: to send a question takes half a millisecond
            entry = self._reader.await_entry(self._stopped.is_set)
            return None if entry is None or entry.batch is None else (entry.number, self._fetch(entry.batch))
        except Exception:  # whoever asks for this entry meets it too, where it can be raised
            return None

    def close(self) -> StepReader:
        """Stop looking ahead, and give the reader back."""
        self._stopped.set()
        self._threads.shutdown()
        return self._reader
