"""A stage: fused kernels between an input and its consumer, run by an executor, delivered in order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, Item, IteratorState
from raydist.pipelines.elements.saved_state import counts_in, texts_in
from raydist.pipelines.engine.kernel import StageSpec
from raydist.pipelines.engine.op_iterator import MACHINERY_ERRORS, OpIterator
from raydist.pipelines.engine.resume import Outbox
from raydist.pipelines.engine.stages.stage_dispatch import SentBlock, StageDispatch, StageWorkers
from raydist.pipelines.metering.meter import Meter

__all__ = ["StageIterator"]


@final
@dataclass(frozen=True, slots=True)
class _Place:
    """A block in flight or an error of the input, and the state of the input after it."""

    item: SentBlock | ElementError
    input_state: IteratorState


@final
class StageIterator(OpIterator):
    """An iterator that keeps a window of blocks in an executor and delivers results in order.

    The state consists of the input's state, the next index of each kernel, and the number of items handed out since.

    Args:
        source: The input.
        spec: Kernels to run.
        workers: Executor settings.
        meter: Counts the work.
    """

    def __init__(self, source: OpIterator, spec: StageSpec, workers: StageWorkers, meter: Meter) -> None:
        self._source = source
        self._workers = workers
        self._results = StageDispatch(spec, workers, meter)
        self._places: deque[_Place] = deque()
        self._next_starts = self._starts = (0,) * len(spec.kernels)
        self._ended = False
        self._outbox: Outbox | None = None

    def next_block(self, limit: int) -> Block:
        return self._filled(limit).take(limit)

    def next_blocks(self, limit: int) -> list[Block]:
        return self._filled(limit).take_together(limit)

    def has_ready(self) -> bool:
        if self._outbox:
            return True
        first = self._places[0].item if self._places else None
        return self._workers.executor.place == "inline" if first is None else _is_done(first)

    def _filled(self, limit: int) -> Outbox:
        outbox = self._open_outbox()
        while not outbox:
            self._submit(limit)
            if not self._places:
                raise StopIteration
            self._receive(outbox, self._places[0])
            self._places.popleft()
        return outbox

    def _open_outbox(self) -> Outbox:
        if self._outbox is None:
            self._outbox = Outbox(self._border(self._source.state_dict()))
        return self._outbox

    def _border(self, input_state: IteratorState) -> IteratorState:
        return {"input": input_state, "starts": list(self._starts), "signatures": list(self._results.signatures)}

    def _submit(self, limit: int) -> None:
        rows, window = self._results.rows(limit), self._workers.window
        while not self._ended and len(self._places) < window:
            begin = time.perf_counter()
            try:
                block = self._source.next_block(rows)
            except StopIteration:
                self._ended = True
            except MACHINERY_ERRORS:
                raise
            except Exception as error:  # of one element of the input: handed out in its place
                self._places.append(_Place(ElementError(error), self._source.state_dict()))
                self._shift(1)
            else:
                sent = self._results.send(block, self._next_starts, time.perf_counter() - begin)
                self._places.append(_Place(sent, self._source.state_dict()))
                self._shift(block.num_rows)

    def _shift(self, count: int) -> None:
        """Advance the next index: exact for kernels before a filter, an assumption for kernels after it."""
        self._next_starts = tuple(start + count for start in self._next_starts)

    def _receive(self, outbox: Outbox, place: _Place) -> None:
        items: Sequence[Item]
        if isinstance(place.item, ElementError):
            items, entered = (place.item,), (1,) * len(self._starts)
        else:
            result = self._results.receive(place.item, self._starts)
            items, entered = result.items, result.inputs
        self._starts = tuple(start + count for start, count in zip(self._starts, entered, strict=True))
        if len(self._places) == 1:  # nothing else is in flight, so the index is exact again
            self._next_starts = self._starts
        outbox.put(items, self._border(place.input_state))

    def state_dict(self) -> IteratorState:
        return self._open_outbox().state_dict()

    def load_state_dict(self, state: IteratorState) -> None:
        border = self._open_outbox().load_state_dict(state)
        self._source.load_state_dict(border["input"])
        self._starts = self._next_starts = counts_in(border["starts"], len(self._starts))
        self._results.signatures = texts_in(border["signatures"], len(self._results.signatures))

    def close(self) -> None:
        self._places.clear()
        self._results.close()
        self._source.close()


def _is_done(item: SentBlock | ElementError) -> bool:
    return isinstance(item, ElementError) or item.work.done()
