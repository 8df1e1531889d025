"""The stages and prefetches that the autotuner gives threads."""

from __future__ import annotations

import threading

from raydist.dataset import Dataset
from raydist.options import AutotuneOptions, Options
from raydist.pipelines.autotune.tuned_executor import TunedPart, TunedPrefetch, TunedStage
from raydist.pipelines.engine.budget import Budgets
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.run.plan import open_iterator
from tests.pipelines.engine.toy_stages import SOURCE, block_of, spec_of

BLOCK = block_of(SOURCE)
WHERE = spec_of(SOURCE.map(lambda x: threading.current_thread() is threading.main_thread()))


def stage(cpu_budget: int | None = None, ram_budget: int | None = None) -> tuple[TunedStage, Budgets, list[TunedPart]]:
    budgets = Budgets(AutotuneOptions(cpu_budget=cpu_budget, ram_budget=ram_budget))
    looks: list[TunedPart] = []
    return TunedStage(IterationMeters().meter("map-1"), budgets, looks.append), budgets, looks


def worked_here(made: TunedStage) -> bool:
    result = made.submit(WHERE, BLOCK, (0,)).result()
    return bool(result.items[0].columns[0][0])  # type: ignore[union-attr]  # a block


def test_a_stage_works_where_it_was_told_to() -> None:
    made, _, looks = stage()
    assert worked_here(made)
    made.apply(2, row_s=0.0005, block_bytes=100)
    assert (made.threads, made.place, made.num_workers, made.window, made.least_rows) == (2, "threads", 2, 4, 4)
    assert not worked_here(made)
    made.apply(0, row_s=0.0005, block_bytes=100)
    assert (made.threads, made.place, made.window, made.least_rows) == (0, "inline", 1, 1)
    assert worked_here(made)
    assert looks == [made] * 3
    made.end()


def test_a_stage_keeps_to_the_budgets() -> None:
    made, budgets, _ = stage(cpu_budget=3, ram_budget=1000)
    budgets.threads.take(1)
    made.apply(5, row_s=0.0005, block_bytes=100)
    assert (made.threads, budgets.threads.free) == (2, 0)
    assert (made.charged_bytes, budgets.ram.free) == (400, 600)
    made.end()
    assert (budgets.threads.free, budgets.ram.free) == (2, 1000)


def test_without_any_thread_left_a_stage_stays_inline() -> None:
    made, budgets, _ = stage(cpu_budget=1)
    budgets.threads.take(1)
    made.apply(2, row_s=0.0005, block_bytes=100)
    assert made.threads == 0
    assert worked_here(made)
    made.end()


def test_the_work_of_a_stage_is_counted() -> None:
    made, _, _ = stage()
    for _ in range(3):
        worked_here(made)
    done = made.take_activity()
    assert (done.rows, done.blocks, done.num_bytes) == (18, 3, 3 * (6 * 8 + 6))
    assert done.busy_s > 0
    assert made.take_activity().rows == 0
    made.end()


def test_closing_a_stage_leaves_it_for_the_next_pass() -> None:
    made, _, _ = stage()
    made.apply(1, row_s=0.0005, block_bytes=100)
    made.close()
    assert not worked_here(made)
    made.end()


def prefetch(cpu_budget: int, *, requested: bool = False) -> tuple[TunedPrefetch, Budgets, list[TunedPart]]:
    budgets = Budgets(AutotuneOptions(cpu_budget=cpu_budget))
    looks: list[TunedPart] = []
    meter = IterationMeters().meter("prefetch-1")
    return TunedPrefetch(meter, budgets, looks.append, requested=requested), budgets, looks


def test_a_prefetch_needs_a_thread_in_the_budget() -> None:
    part, budgets, _ = prefetch(1)
    part.apply(1)
    assert part.is_on
    part.apply(0)
    assert not part.is_on
    budgets.threads.take(1)
    part.apply(1)
    assert not part.is_on


def test_a_requested_prefetch_needs_no_budget() -> None:
    part, budgets, _ = prefetch(1, requested=True)
    budgets.threads.take(1)
    part.apply(1)
    assert part.is_on


def test_a_thread_that_runs_gives_itself_back_when_it_ends() -> None:
    part, budgets, _ = prefetch(1)
    part.apply(1)
    op = Dataset.range(100).repeat()._op
    source = open_iterator(op, seed=0, epoch=0, options=Options(), executor=InlineExecutor())
    ahead = part.read_ahead(source, 4)
    ahead.start()
    assert ahead.get() is not None
    assert (part.is_on, budgets.threads.free) == (True, 0)
    part.apply(0)
    assert budgets.threads.free == 0
    ahead.stop()
    assert budgets.threads.free == 1
    assert part.done.busy_s > 0


def test_blocks_of_a_prefetch_are_counted_and_looked_at() -> None:
    part, _, looks = prefetch(1)
    part.look()
    part.handed_out(5, 40)
    assert looks == [part]
    assert (part.done.rows, part.done.blocks, part.done.num_bytes) == (5, 1, 40)
