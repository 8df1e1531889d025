from __future__ import annotations

import threading
from typing import final

import numpy as np
import pytest

from raydist.core.errors import UnavailableError
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import IteratorState, count_items
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.engine.block_size import BufferSize
from raydist.pipelines.engine.budget import Budget
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.prefetch_thread import PrefetchThread
from raydist.pipelines.metering.iteration_meters import IterationMeters

ROW_BYTES = 100


@final
class Source(OpIterator):
    """`count` elements of 100 bytes; then, if there is one, an error."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count = count
        self.error = error
        self.made = 0
        self.closed = threading.Event()
        self.most_made = threading.Event()

    def next_block(self, limit: int) -> Block:
        rows = min(limit, self.count - self.made)
        if not rows:
            raise self.error or StopIteration
        self.made += rows
        return block_of_rows([np.zeros(ROW_BYTES, np.uint8)] * rows)

    def state_dict(self) -> IteratorState:
        return {"made": self.made}

    def load_state_dict(self, state: IteratorState) -> None:
        self.made = int(state["made"])

    def close(self) -> None:
        self.closed.set()


def reading(source: Source, size: int, ram: Budget | None = None) -> PrefetchThread:
    meter = IterationMeters().meter("prefetch")
    ahead = PrefetchThread(source, BufferSize(size, tuned=False), ram or Budget(), meter, name="prefetch-1")
    ahead.start()
    return ahead


def rows_until_the_end(ahead: PrefetchThread) -> int:
    rows = 0
    while (ready := ahead.get()) is not None:
        rows += count_items(ready[0])
        assert ready[1] == {"made": rows}
    return rows


def test_everything_comes_with_its_state() -> None:
    source = Source(57)
    ahead = reading(source, 8)
    assert rows_until_the_end(ahead) == 57
    assert not ahead.was_paused
    assert source.closed.wait(10)
    ahead.stop()


def test_a_pause_leaves_the_source_open_where_it_is() -> None:
    source = Source(10_000)
    ahead = reading(source, 8)
    first = ahead.get()
    assert first is not None
    ahead.pause()
    ahead.pause()
    rows = 0
    while (ready := ahead.get()) is not None:
        rows = int(ready[1]["made"])
    assert ahead.was_paused
    assert (source.made, source.closed.is_set()) == (rows, False)
    ahead.stop()


def test_an_error_of_the_machinery_stands_behind_what_was_made() -> None:
    ahead = reading(Source(3, UnavailableError("gone")), 8)
    rows = 0
    while rows < 3:
        ready = ahead.get()
        assert ready is not None
        rows += count_items(ready[0])
    with pytest.raises(UnavailableError, match="gone"):
        ahead.get()
    ahead.stop()


@pytest.mark.parametrize("bytes_left", [0, 150, 1000])
def test_the_buffer_never_holds_more_than_the_budget_or_one_element(bytes_left: int) -> None:
    ram, most = Budget(bytes_left), 0.0
    ahead = reading(Source(200), 64, ram)
    rows = 0
    while (ready := ahead.get()) is not None:
        most = max(most, ram.limit - ram.free)
        rows += count_items(ready[0])
    assert rows == 200
    assert most <= max(bytes_left, ROW_BYTES)
    ahead.stop()
    assert ram.free == bytes_left


def test_two_buffers_share_a_budget_and_both_go_on() -> None:
    ram = Budget(500)
    both = [reading(Source(100), 64, ram) for _ in range(2)]
    rows = [0, 0]
    for _ in range(10):
        for number, ahead in enumerate(both):
            ready = ahead.get()
            assert ready is not None
            rows[number] += count_items(ready[0])
            assert ram.limit - ram.free <= 500 + 2 * ROW_BYTES  # each may hold one element beyond it
    assert [made + rows_until_end(ahead) for made, ahead in zip(rows, both, strict=True)] == [100, 100]
    for ahead in both:
        ahead.stop()
    assert ram.free == 500


def rows_until_end(ahead: PrefetchThread) -> int:
    rows = 0
    while (ready := ahead.get()) is not None:
        rows += count_items(ready[0])
    return rows


def test_stopping_gives_the_memory_back_and_closes_the_source() -> None:
    ram, source = Budget(10_000), Source(1 << 30)
    ahead = reading(source, 64, ram)
    assert ahead.get() is not None
    ahead.stop()
    ahead.stop()
    assert source.closed.is_set()
    assert ram.free == 10_000
