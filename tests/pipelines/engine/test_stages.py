"""Stages in order: kernels on blocks, threads and their limits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import final

import pytest

from raydist.core.errors import CancelledError, DeadlineExceededError, UnavailableError
from raydist.dataset import Dataset
from raydist.options import Options, Timeouts
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, Item, StageResult
from raydist.pipelines.engine.budget import Budget
from raydist.pipelines.engine.executor import Executor, Pending
from raydist.pipelines.engine.kernel import Kernel, StageSpec, run_stage
from raydist.pipelines.engine.threads import ThreadExecutor
from raydist.pipelines.run.plan import open_iterator
from tests.contracts.op import collect, iterate
from tests.pipelines.engine.toy_stages import SOURCE, ToyPool, block_of, spec_of


def test_a_window_of_blocks_is_kept_under_way() -> None:
    pool = ToyPool(3)
    dataset = Dataset.range(50).map(lambda x: x + 1)
    iterator = open_iterator(dataset._op, seed=0, epoch=0, options=Options(), executor=pool)
    assert iterator.next_block(4).rows() == [1, 2]
    assert pool.most == 3
    assert iterator.next_block(4).rows() == [3, 4]
    iterator.close()
    assert not pool.closed, "who made the executor closes it"
    pool = ToyPool(5)
    collect(iterate(Dataset.range(50).map(lambda x: x + 1, num_parallel_calls=2), lambda options: pool))
    assert pool.most == 2
    assert pool.closed


def test_a_lost_worker_loses_no_element() -> None:
    pools = iter([ToyPool(2, lose=1), ToyPool(2)])
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


def test_a_kernel_that_fails_as_a_whole_is_run_row_by_row() -> None:
    @final
    class Picky(Kernel):
        label = "picky-1"
        uses_index = False

        def run(self, block: Block, start: int) -> Sequence[Item]:
            if 2 in block.columns[0]:
                raise MemoryError("too large")
            return [block]

    items = run_stage(StageSpec("stage", (Picky(),)), block_of(SOURCE), (10,)).items
    found = [item.index if isinstance(item, ElementError) else item.rows() for item in items]
    assert found == [[0], [1], 12, [3], [4], [5]]


BLOCK = block_of(SOURCE)


def test_a_stuck_function_is_an_error_after_the_limit() -> None:
    release = threading.Event()
    executor = ThreadExecutor(1, Timeouts(element_s=0.05))
    pending = executor.submit(spec_of(SOURCE.map(lambda x: release.wait(20))), BLOCK.slice(0, 1), (0,))
    with pytest.raises(DeadlineExceededError, match=r"Stage stage must finish a block of 1 elements within 0\.05 s"):
        pending.result()
    release.set()
    executor.close()


def test_closing_gives_up_what_has_not_begun() -> None:
    begun, release = threading.Event(), threading.Event()

    def blocks(x: int) -> bool:
        begun.set()
        return release.wait(20)

    executor = ThreadExecutor(1)
    first = executor.submit(spec_of(SOURCE.map(blocks)), BLOCK.slice(0, 1), (0,))
    waiting = executor.submit(spec_of(SOURCE.map(blocks)), BLOCK.slice(1, 2), (1,))
    assert begun.wait(20)
    threading.Timer(0.02, release.set).start()
    executor.close()
    assert len(first.result().items) == 1
    with pytest.raises(CancelledError, match="closed before this block was begun"):
        waiting.result()
    with pytest.raises(CancelledError, match="needs an open executor"):
        executor.submit(spec_of(SOURCE.map(blocks)), BLOCK, (0,))
    executor.close()


def test_system_exit_in_a_function_reaches_the_caller() -> None:
    executor = ThreadExecutor(1)
    pending = executor.submit(spec_of(SOURCE.map(lambda x: exit(3))), BLOCK.slice(0, 1), (0,))
    with pytest.raises(SystemExit):
        pending.result()
    executor.close()


def test_closing_beside_who_starts_threads_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, entered, go_on = Budget(), threading.Event(), threading.Event()
    take = budget.take

    def held(wanted: int) -> int:
        entered.set()
        go_on.wait(10)
        return take(wanted)

    monkeypatch.setattr(budget, "take", held)
    executor = ThreadExecutor(0, budget=budget)
    starts = threading.Thread(target=executor.resize, args=(2,))
    starts.start()
    assert entered.wait(10)
    closes = threading.Thread(target=executor.close)
    closes.start()
    closes.join(0.2)
    go_on.set()
    for thread in (starts, closes):
        thread.join(10)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("raydist-map")]


def test_what_comes_beside_closing_is_refused_or_cancelled() -> None:
    spec, block = spec_of(SOURCE.map(lambda x: x)), BLOCK.slice(0, 1)
    for _ in range(50):
        executor = ThreadExecutor(1, Timeouts(element_s=5.0))
        executor.submit(spec, block, (0,)).result()
        closes = threading.Thread(target=executor.close)
        closes.start()
        with contextlib.suppress(CancelledError):
            while True:
                executor.submit(spec, block, (0,)).result()
        closes.join(10)
