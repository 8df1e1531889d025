"""Reading ahead in a thread: buffers, states, and closing while a function does not return."""

from __future__ import annotations

import threading
import time
from typing import final

import numpy as np
import pytest

from raydist.dataset import Dataset
from raydist.options import Timeouts
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import IteratorState, count_items
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.engine import prefetch_thread
from raydist.pipelines.engine.block_size import BufferSize
from raydist.pipelines.engine.budget import Budget
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.prefetch_thread import PrefetchThread
from raydist.pipelines.engine.threads import ThreadExecutor
from raydist.pipelines.metering.iteration_meters import IterationMeters
from tests.contracts.op import MakeExecutor, iterate

ROW_BYTES = 100


@final
class Source(OpIterator):
    """`count` elements of 100 bytes."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.made = 0
        self.closed = False

    def next_block(self, limit: int) -> Block:
        rows = min(limit, self.count - self.made)
        if not rows:
            raise StopIteration
        self.made += rows
        return block_of_rows([np.zeros(ROW_BYTES, np.uint8)] * rows)

    def state_dict(self) -> IteratorState:
        return {"made": self.made}

    def load_state_dict(self, state: IteratorState) -> None:
        self.made = int(state["made"])

    def close(self) -> None:
        self.closed = True


def reading(source: Source, ram: Budget) -> PrefetchThread:
    meter = IterationMeters().meter("prefetch")
    ahead = PrefetchThread(source, BufferSize(64, tuned=False), ram, meter, name="prefetch-1")
    ahead.start()
    return ahead


def next_rows(ahead: PrefetchThread) -> int:
    ready = ahead.get()
    assert ready is not None
    return count_items(ready[0])


def rows_until_the_end(ahead: PrefetchThread, rows: int = 0) -> int:
    while (ready := ahead.get()) is not None:
        rows += count_items(ready[0])
        assert ready[1] == {"made": rows}
    return rows


def test_the_buffer_never_holds_more_than_the_budget_or_one_element() -> None:
    for bytes_left in (0, 150, 1000):
        ram, most = Budget(bytes_left), 0.0
        ahead = reading(Source(200), ram)
        rows = 0
        while (ready := ahead.get()) is not None:
            most = max(most, ram.limit - ram.free)
            rows += count_items(ready[0])
        assert rows == 200
        assert most <= max(bytes_left, ROW_BYTES), bytes_left
        ahead.stop()
        assert ram.free == bytes_left


def test_two_buffers_share_a_budget_and_both_go_on() -> None:
    ram = Budget(500)
    both = [reading(Source(100), ram) for _ in range(2)]
    rows = [0, 0]
    for _ in range(10):
        for number, ahead in enumerate(both):
            rows[number] += next_rows(ahead)
            assert ram.limit - ram.free <= 500 + 2 * ROW_BYTES  # each may hold one element beyond it
    assert [rows_until_the_end(ahead, made) for made, ahead in zip(rows, both, strict=True)] == [100, 100]
    for ahead in both:
        ahead.stop()
    assert ram.free == 500


def test_stopping_gives_the_memory_back_and_closes_the_source() -> None:
    ram, source = Budget(10_000), Source(1 << 30)
    ahead = reading(source, ram)
    next_rows(ahead)
    ahead.stop()
    ahead.stop()
    assert source.closed
    assert ram.free == 10_000


@pytest.mark.parametrize(
    ("executor", "warning"),
    [
        (lambda options: ThreadExecutor(2, Timeouts(close_s=0.2)), r"raydist-map-\d .* stage map-1@0: map-1 \("),
        (lambda options: InlineExecutor(), r"raydist-prefetch-2 .* making the input of prefetch-2"),
    ],
)
def test_a_thread_whose_function_does_not_return_is_left_behind_by_name(
    executor: MakeExecutor, warning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch_thread, "CLOSE_S", 0.2)
    reached, release = threading.Event(), threading.Event()

    def stuck(x: int) -> int:
        if x == 5:
            reached.set()
            release.wait(50)
        return x

    iterator = iterate(Dataset.range(20).map(stuck).prefetch(20), executor)
    try:
        assert [int(next(iterator)) for _ in range(3)] == [0, 1, 2]
        assert reached.wait(20)
        begin = time.monotonic()
        with pytest.warns(RuntimeWarning, match=f"Thread {warning}"):
            iterator.close()
        assert time.monotonic() - begin < 5.0
    finally:
        release.set()
