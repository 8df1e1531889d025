from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import final

import pytest

from raydist.core.errors import UnavailableError
from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import StageResult
from raydist.pipelines.engine.executor import Executor, Pending
from raydist.pipelines.engine.kernel import StageSpec, run_stage
from raydist.pipelines.run.plan import open_iterator
from tests.contracts.op import collect, iterate


@final
class Later(Pending):
    def __init__(self, pool: LatePool, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> None:
        self.pool = pool
        self.work = (spec, block, starts)

    def result(self) -> StageResult:
        self.pool.waiting.remove(self)
        if self.pool.lost:
            self.pool.lost.pop()
            self.pool.waiting.appendleft(self)
            raise UnavailableError("worker 1 is gone")
        return run_stage(*self.work)


@final
class LatePool(Executor):
    """Does nothing before a result is asked for, and remembers how much was waiting."""

    def __init__(self, window: int, lose: int = 0) -> None:
        self.window = window
        self.waiting: deque[Later] = deque()
        self.most = 0
        self.lost = [None] * lose
        self.closed = False

    def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        self.waiting.append(Later(self, spec, block, starts))
        self.most = max(self.most, len(self.waiting))
        return self.waiting[-1]

    def close(self) -> None:
        self.closed = True


def test_a_window_of_blocks_is_kept_under_way() -> None:
    pool = LatePool(3)
    dataset = Dataset.range(50).map(lambda x: x + 1)
    iterator = open_iterator(dataset._op, seed=0, epoch=0, options=Options(), executor=pool)
    assert iterator.next_block(4).rows() == [1, 2]
    assert pool.most == 3
    assert iterator.next_block(4).rows() == [3, 4]
    iterator.close()
    assert not pool.closed, "who made the executor closes it"


def test_num_parallel_calls_limits_the_window() -> None:
    pool = LatePool(5)
    dataset = Dataset.range(50).map(lambda x: x + 1, num_parallel_calls=2)
    collect(iterate(dataset, lambda options: pool))
    assert pool.most == 2
    assert pool.closed


def test_the_index_in_a_note_is_right_behind_a_filter_on_any_executor() -> None:
    def fails(x: int) -> int:
        raise ValueError(f"element {x}")

    dataset = Dataset.range(200).filter(lambda x: x % 50 == 49).map(fails)
    iterator = iterate(dataset, lambda options: LatePool(4))
    for number in range(4):
        with pytest.raises(ValueError, match="element") as caught:
            next(iterator)
        assert caught.value.__notes__[0].endswith(f"element {number} of its input.")
    iterator.close()


def test_another_kind_of_element_is_an_error_wherever_blocks_are_cut() -> None:
    dataset = Dataset.range(300).map(lambda x: x if x < 250 else float(x))
    for pool in (LatePool(1), LatePool(4)):
        items = collect(iterate(dataset, use(pool)))
        assert len(items) == 300
        assert all(item[0] == "SpecError" for item in items[250:])


def use(pool: LatePool) -> Callable[[Options], Executor]:
    return lambda options: pool


def test_the_known_kind_is_part_of_the_state() -> None:
    dataset = Dataset.range(6).map(lambda x: x if x < 3 else float(x))
    first = iterate(dataset)
    collect(first, 4)
    resumed = iterate(dataset)
    resumed.load_state_dict(first.state_dict())
    assert [item[0] for item in collect(resumed)] == ["SpecError"] * 2


def test_a_lost_worker_loses_no_element() -> None:
    pools = iter([LatePool(2, lose=1), LatePool(2)])
    iterator = iterate(Dataset.range(10).map(lambda x: x).batch(5), lambda options: next(pools))
    with pytest.raises(UnavailableError):
        next(iterator)
    assert [batch.tolist() for batch in iterator] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_a_block_that_no_worker_can_work_on_is_an_error_per_element() -> None:
    @final
    class Broken(Pending):
        def result(self) -> StageResult:
            raise ImportError("no module named 'mine'")

    @final
    class BrokenPool(Executor):
        window = 2

        def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
            return Broken()

        def close(self) -> None:
            """Nothing to stop."""

    items = collect(iterate(Dataset.range(7).map(abs), lambda options: BrokenPool()))
    assert items == [("ImportError", "no module named 'mine'")] * 7


def test_threads_finish_in_any_order_and_deliver_in_one() -> None:
    later = threading.Event()

    def waits(x: int) -> int:
        if x == 0:
            later.wait(20)
        else:
            later.set()
        return x

    assert [int(x) for x in Dataset.range(6).map(waits, num_parallel_calls=3)] == list(range(6))
