"""An iterator that counts and times the one inside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar, final

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.engine.op_iterator import MACHINERY_ERRORS, ClosesInput, OpIterator
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.metering.meter import Meter

__all__ = ["MeteredIterator"]

_Made = TypeVar("_Made")


@final
class MeteredIterator(ClosesInput, OpIterator):
    """Tells a meter about each block of `source`.

    Own time is the time of a call less that of the metered calls inside it, in the same thread: so it does not matter
    how many inputs there are, who else reads them, or which of them are read in other threads.
    """

    def __init__(self, source: OpIterator, meter: Meter, meters: IterationMeters) -> None:
        self._source = source
        self._meter = meter
        self._clock = meters.clock

    def next_block(self, limit: int) -> Block:
        return self._metered(self._source.next_block, self._meter.handed_out, limit)

    def next_blocks(self, limit: int) -> list[Block]:
        return self._metered(self._source.next_blocks, self._meter.handed_out_together, limit)

    def _metered(self, read: Callable[[int], _Made], count: Callable[[_Made], None], limit: int) -> _Made:
        meter, clock = self._meter, self._clock
        outer_s = clock.inner_s
        clock.inner_s = 0.0
        before = meter.elements
        begin = time.perf_counter()
        try:
            made = read(limit)
            count(made)
            return made
        except (StopIteration, *MACHINERY_ERRORS):
            raise
        except Exception:
            meter.errors += 1
            raise
        finally:
            spent_s = time.perf_counter() - begin
            meter.own_s += spent_s - clock.inner_s
            meter.input_s += clock.inner_s
            clock.inner_s = outer_s + spent_s
            if meter.ring is not None:
                meter.ring.record_here(meter.name, begin, spent_s, meter.elements - before)

    def has_ready(self) -> bool:
        return self._source.has_ready()

    def state_dict(self) -> IteratorState:
        return self._source.state_dict()

    def load_state_dict(self, state: IteratorState) -> None:
        self._source.load_state_dict(state)
