from __future__ import annotations

from typing import final

import numpy as np
import pytest

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.request_size import RequestSize


@final
class Source(OpIterator):
    """Elements of some bytes, each taking some time on a clock of its own."""

    def __init__(self, row_bytes: int, row_seconds: float) -> None:
        self.row_bytes = row_bytes
        self.row_seconds = row_seconds
        self.now = 0.0
        self.asked: list[int] = []

    def next_block(self, limit: int) -> Block:
        self.asked.append(limit)
        self.now += limit * self.row_seconds
        return block_of_rows([np.zeros(self.row_bytes, np.uint8)] * limit)

    def state_dict(self) -> IteratorState:
        return {}

    def load_state_dict(self, state: IteratorState) -> None:
        """There is none."""


def ask(monkeypatch: pytest.MonkeyPatch, source: Source, times: int = 16, most: int = 4096) -> list[int]:
    monkeypatch.setattr("raydist.pipelines.engine.request_size.time.perf_counter", lambda: source.now)
    demand = RequestSize(most)
    for _ in range(times):
        demand.read(source, 1 << 40)
    return source.asked


def test_quick_small_elements_are_read_in_ever_larger_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, Source(8, 0.0), times=8, most=64) == [1, 2, 4, 8, 16, 32, 64, 64]


def test_slow_elements_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(ask(monkeypatch, Source(8, 1.0))) == {1}


def test_blocks_take_neither_long_nor_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(ask(monkeypatch, Source(8, 0.001))) == 2
    assert max(ask(monkeypatch, Source(200_000, 0.0))) * 200_000 <= 4 << 20


@final
class InSingles(OpIterator):
    """Hands out as many as it is asked for, each as a block of its own."""

    def __init__(self, row_bytes: int) -> None:
        self.row_bytes = row_bytes

    def next_block(self, limit: int) -> Block:
        return block_of_rows([np.zeros(self.row_bytes, np.uint8)])

    def next_blocks(self, limit: int) -> list[Block]:
        return [self.next_block(1) for _ in range(limit)]

    def state_dict(self) -> IteratorState:
        return {}

    def load_state_dict(self, state: IteratorState) -> None:
        """There is none."""


@pytest.mark.parametrize(("row_bytes", "most"), [(8, 64), (1 << 16, 16), (1 << 20, 4), (3 << 20, 1)])
def test_blocks_that_come_together_count_as_one(monkeypatch: pytest.MonkeyPatch, row_bytes: int, most: int) -> None:
    monkeypatch.setattr("raydist.pipelines.engine.request_size.time.perf_counter", lambda: 0.0)
    demand = RequestSize(64)
    got = [len(demand.read_together(InSingles(row_bytes), 1 << 40)) for _ in range(9)]
    assert max(got) == most
    assert got[0] == 1


def test_the_callers_limit_holds() -> None:
    source = Source(8, 0.0)
    demand = RequestSize()
    for _ in range(5):
        demand.read(source, 3)
    assert max(source.asked) <= 3


@final
class Filtered(OpIterator):
    """Hands out one of `every` elements that it is asked for, or one."""

    def __init__(self, every: int) -> None:
        self.every = every

    def next_block(self, limit: int) -> Block:
        return block_of_rows([0] * max(1, limit // self.every))

    def state_dict(self) -> IteratorState:
        return {}

    def load_state_dict(self, state: IteratorState) -> None:
        """There is none."""


def test_who_hands_out_fewer_elements_is_asked_for_more_too() -> None:
    demand = RequestSize()
    for _ in range(20):
        demand.read(Filtered(10), 1 << 40)
    assert demand.rows == 4096
    for every, most in ((10_000, 32), (4096, 32)):
        demand = RequestSize()
        for _ in range(20):
            demand.read(Filtered(every), 1 << 40)
        assert demand.rows == most, "so many may come at once, too large or too late"


def test_large_elements_are_asked_for_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(ask(monkeypatch, Source(1 << 20, 0.0))) == 4
    assert max(ask(monkeypatch, Source(3 << 20, 0.0))) == 1
    assert max(ask(monkeypatch, Source(1 << 16, 0.0))) == 16
