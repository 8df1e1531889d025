"""An iterator over a source that a thread prefetches while a policy says so.

Its state has one form, whatever the policy: the state of the source before the items not handed out, and a count of
handed-out items.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.prefetch_thread import PrefetchThread
from raydist.pipelines.engine.producers import read_item
from raydist.pipelines.engine.resume import Outbox


class OptionalPrefetch(ABC):
    """A policy that decides if a thread prefetches a pipeline. The iterator asks it before each block.

    By default a thread always prefetches.
    """

    @property
    def is_on(self) -> bool:
        """Return True if a thread is to prefetch now."""
        return True

    def look(self) -> None:  # noqa: B027 - optional
        """Decide again if it is time. The reader calls this before each block."""

    @abstractmethod
    def read_ahead(self, source: OpIterator, rows: int) -> PrefetchThread:
        """Return a thread for `source`, not yet started, that keeps `rows` elements ready, or more where that helps."""

    def made(self, seconds: float) -> None:  # noqa: B027 - optional
        """Note that a block was made in `seconds`, in any thread."""

    def handed_out(self, rows: int, num_bytes: int) -> None:  # noqa: B027 - optional
        """Note that the consumer received a block."""


@final
class SteadyPrefetch(OptionalPrefetch):
    """A policy that always prefetches. `make_thread` returns the thread that reads a source, not yet started."""

    def __init__(self, make_thread: Callable[[OpIterator], PrefetchThread]) -> None:
        self._make_thread = make_thread

    def read_ahead(self, source: OpIterator, rows: int) -> PrefetchThread:
        return self._make_thread(source)


@final
class ReadAhead(OpIterator):
    """An iterator that reads its source itself or from a prefetch thread. Its state covers the elements handed out.

    The iterator switches between two blocks: to the thread at once, and back when all results of the thread are handed
    out. Without a policy, the iterator reads the source itself.
    """

    def __init__(self, source: OpIterator, part: OptionalPrefetch | None) -> None:
        self._source = source
        self._part = part
        self._ahead: PrefetchThread | None = None
        self._outbox: Outbox | None = None  # None: all items are handed out
        self._rows = 1

    def next_block(self, limit: int) -> Block:
        part = self._part
        if part is None:
            return self._read(limit)
        part.look()
        if self._ahead is None and part.is_on:
            self._start(part, limit)
        if self._ahead is not None:
            if not part.is_on:
                self._ahead.pause()
            block = self._take(self._ahead, limit)
        else:
            begin = time.perf_counter()
            block = self._read(limit)
            part.made(time.perf_counter() - begin)
        self._rows = block.num_rows
        part.handed_out(self._rows, block.num_bytes)
        return block

    def _start(self, part: OptionalPrefetch, limit: int) -> None:
        self._open_outbox()
        self._ahead = part.read_ahead(self._source, 2 * max(1, min(limit, self._rows)))
        self._ahead.start()

    def _take(self, ahead: PrefetchThread, limit: int) -> Block:
        """Return the next result of the thread; after a pause, the next block of the source."""
        outbox = self._open_outbox()
        while not outbox:
            ready = ahead.get()
            if ready is None:
                if not ahead.was_paused:
                    raise StopIteration
                self._ahead = None
                return self._read(limit)
            outbox.put(*ready)
        return outbox.take(limit)

    def _read(self, limit: int) -> Block:
        while self._outbox is not None and not self._outbox:
            if self._outbox.is_clean:
                self._outbox = None
                break
            self._outbox.put([read_item(self._source, limit)], self._source.state_dict())
        return self._source.next_block(limit) if self._outbox is None else self._outbox.take(limit)

    def _open_outbox(self) -> Outbox:
        if self._outbox is None:
            self._outbox = Outbox(self._source.state_dict())
        return self._outbox

    def has_ready(self) -> bool:
        if self._ahead is None and self._part is not None and self._part.is_on:
            self._start(self._part, 1)
        return bool(self._outbox) or (self._source.has_ready() if self._ahead is None else self._ahead.has_ready)

    def state_dict(self) -> IteratorState:
        if self._outbox is None:
            return {"at": self._source.state_dict(), "skip": 0}
        return self._outbox.state_dict()

    def load_state_dict(self, state: IteratorState) -> None:
        self._outbox = Outbox({})
        self._source.load_state_dict(self._outbox.load_state_dict(state))

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.stop()
        if self._ahead is None or self._ahead.was_paused:
            self._source.close()
