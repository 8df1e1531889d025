"""The prefetch that raydist puts at the end of a pipeline: a thread only while it makes the whole faster."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar, final

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import State
from raydist.pipelines.engine.op import IterContext, UnaryOp
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.optional_prefetch import OptionalPrefetch
from raydist.pipelines.engine.prefetch_thread import PrefetchThread
from raydist.pipelines.engine.producers import read_item
from raydist.pipelines.engine.resume import Outbox

__all__ = ["PrefetchWhereItPaysOp"]


@final
@dataclass(frozen=True, eq=False)
class PrefetchWhereItPaysOp(UnaryOp):
    """`input`, made by the consumer's thread or by another one, as the autotuner finds out."""

    state_is_recent: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "prefetch"

    @property
    def label(self) -> str:
        return "prefetch(where it pays)"

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        source = ctx.build(self.input)
        return _Iterator(source, ctx.executor.for_prefetch(ctx.meter(self), ctx.meters, ctx.budgets))


@final
class _Iterator(OpIterator):
    """Reads its source itself, or takes what a thread has read; in both cases its state is of what was handed out.

    It changes over between two blocks: to the thread at once, back when all that the thread has made is handed out.
    """

    def __init__(self, source: OpIterator, part: OptionalPrefetch | None) -> None:
        self._source = source
        self._part = part
        self._ahead: PrefetchThread | None = None
        self._outbox: Outbox | None = None  # None: all that was made is handed out
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
        part.handed_out(block.num_rows, block.num_bytes)
        return block

    def _start(self, part: OptionalPrefetch, limit: int) -> None:
        self._outbox = self._outbox or Outbox(self._source.state_dict())
        self._ahead = part.read_ahead(self._source, 2 * max(1, min(limit, self._rows)))
        self._ahead.start()

    def _take(self, ahead: PrefetchThread, limit: int) -> Block:
        """The next block that the thread has made, or the next one after it has stopped."""
        outbox = self._open_outbox()
        while not outbox:
            ready = ahead.get()
            if ready is None:
                if not ahead.was_paused:
                    raise StopIteration
                self._ahead = None
                return self._read(limit)
            outbox.put([ready[0]], ready[1])
        return outbox.take(limit)

    def _read(self, limit: int) -> Block:
        outbox = self._outbox
        while outbox is not None and not outbox:
            if outbox.is_clean:
                self._outbox = outbox = None
                break
            outbox.put([read_item(self._source, limit)], self._source.state_dict())
        block = self._source.next_block(limit) if outbox is None else outbox.take(limit)
        self._rows = block.num_rows
        return block

    def _open_outbox(self) -> Outbox:
        return self._outbox if self._outbox is not None else Outbox(self._source.state_dict())

    def state_dict(self) -> State:
        return self._open_outbox().state_dict()

    def load_state_dict(self, state: State) -> None:
        self._outbox = Outbox({})
        self._source.load_state_dict(self._outbox.load_state_dict(state))

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.stop()
        if self._ahead is None or self._ahead.was_paused:
            self._source.close()
