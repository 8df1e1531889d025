"""Both iterators hand out the same, and go on from each other's states. How they run: `ops/test_prefetch*.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import final

import numpy as np
import pytest

from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.engine.block_size import BufferSize
from raydist.pipelines.engine.budget import Budget
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.prefetch_thread import PrefetchThread
from raydist.pipelines.engine.read_ahead import OptionalPrefetch, ReadAhead, SteadyPrefetch
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.run.plan import open_iterator

SIZE = 60


def thread(source: OpIterator) -> PrefetchThread:
    meter = IterationMeters().meter("prefetch-1")
    return PrefetchThread(source, BufferSize(8, tuned=False), Budget(), meter, name="prefetch-1")


@final
class Switch(OptionalPrefetch):
    """On for some blocks, off for as many, and so on; begins with `is_on`."""

    def __init__(self, every: int, *, begins_on: bool) -> None:
        self._every = every
        self._blocks = every if begins_on else 0

    @property
    def is_on(self) -> bool:
        return self._blocks // self._every % 2 == 1

    def look(self) -> None:
        """Blocks alone count."""

    def read_ahead(self, source: OpIterator, rows: int) -> PrefetchThread:
        return thread(source)

    def made(self, seconds: float) -> None:
        """Blocks alone count."""

    def handed_out(self, rows: int, num_bytes: int) -> None:
        self._blocks += 1


def batches() -> OpIterator:
    """Its state is that of a reader that holds a rest: see `resume.py`."""
    op = Dataset.range(3 * SIZE).map(lambda x: x).batch(3)._op
    return open_iterator(op, seed=0, epoch=0, options=Options(), executor=InlineExecutor())


MAKERS: dict[str, Callable[[], OpIterator]] = {
    "thread": lambda: ReadAhead(batches(), SteadyPrefetch(thread)),
    "none": lambda: ReadAhead(batches(), None),
    "off at first": lambda: ReadAhead(batches(), Switch(2, begins_on=False)),
    "on at first": lambda: ReadAhead(batches(), Switch(3, begins_on=True)),
}


def read(iterator: OpIterator, limit: int, blocks: int = 1000) -> list[int]:
    got: list[int] = []
    for _ in range(blocks):
        try:
            got += [int(row[0]) // 3 for row in iterator.next_block(limit).columns[0]]
        except StopIteration:
            break
    return got


@pytest.mark.parametrize("loads", MAKERS)
@pytest.mark.parametrize("saves", MAKERS)
def test_each_goes_on_from_the_others_states(saves: str, loads: str) -> None:
    first = MAKERS[saves]()
    got: list[int] = []
    while len(got) < SIZE:
        state = json.loads(json.dumps(first.state_dict()))
        second = MAKERS[loads]()
        second.load_state_dict(state)
        assert second.state_dict() == state
        assert read(second, 4) == list(range(len(got), SIZE))
        second.close()
        got += read(first, 1, blocks=1)
    first.close()
    assert got == list(range(SIZE))


def large_results(rows: int = SIZE) -> OpIterator:
    """Each is a block of its own; those of one request lie ready together."""
    op = Dataset.range(rows).map(lambda x: np.full(1 << 13, x))._op
    return open_iterator(op, seed=0, epoch=0, options=Options(), executor=InlineExecutor())


LARGE_MAKERS: dict[str, Callable[[], OpIterator]] = {
    "thread": lambda: ReadAhead(large_results(), SteadyPrefetch(thread)),
    "none": lambda: ReadAhead(large_results(), None),
    "off at first": lambda: ReadAhead(large_results(), Switch(2, begins_on=False)),
    "on at first": lambda: ReadAhead(large_results(), Switch(3, begins_on=True)),
}


def read_together(iterator: OpIterator, limit: int) -> list[int]:
    return [int(row[0]) for block in iterator.next_blocks(limit) for row in block.columns[0]]


@pytest.mark.parametrize("limits", [(4,), (1, 4, 2, 7)])
@pytest.mark.parametrize("name", LARGE_MAKERS)
def test_blocks_that_lie_ready_come_together_with_the_state_behind_them(name: str, limits: tuple[int, ...]) -> None:
    first = LARGE_MAKERS[name]()
    got: list[int] = []
    while len(got) < SIZE:
        second = LARGE_MAKERS["none"]()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert read_together(second, 1) == [len(got)]
        second.close()
        limit = limits[len(got) % len(limits)]
        more = read_together(first, limit)
        assert 1 <= len(more) <= limit
        got += more
    first.close()
    assert got == list(range(SIZE))


def test_large_results_of_one_request_are_handed_on_by_one_call() -> None:
    source = large_results(9)
    assert [len(source.next_blocks(4)) for _ in range(3)] == [4, 4, 1]
    source.close()


def test_one_that_was_not_asked_yet_begins_to_work() -> None:
    iterator = MAKERS["on at first"]()
    iterator.has_ready()
    assert read(iterator, 4) == list(range(SIZE))
    assert iterator.has_ready()
    iterator.close()
