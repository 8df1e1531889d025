from __future__ import annotations

import threading

from raydist.options import AutotuneOptions, Options
from raydist.pipelines.autotune.model import INLINE, StageSetting
from raydist.pipelines.autotune.tuned_executor import TunedStage
from raydist.pipelines.autotune.tuned_part import TunedPart
from raydist.pipelines.engine.budget import Budgets
from raydist.pipelines.metering.iteration_meters import IterationMeters
from tests.pipelines.engine.toy_stages import SOURCE, block_of, spec_of

BLOCK = block_of(SOURCE)
WHERE = spec_of(SOURCE.map(lambda x: threading.current_thread() is threading.main_thread()))


def stage(**budget: int) -> tuple[TunedStage, Budgets, list[TunedPart]]:
    options = Options(autotune=AutotuneOptions(**budget))
    budgets = Budgets(options.autotune)
    looks: list[TunedPart] = []
    return TunedStage(IterationMeters().meter("map-1"), budgets, looks.append), budgets, looks


def worked_here(made: TunedStage) -> bool:
    result = made.submit(WHERE, BLOCK, (0,)).result()
    return bool(result.items[0].columns[0][0])  # type: ignore[union-attr]  # a block


def test_it_works_where_it_was_told_to() -> None:
    made, _, looks = stage()
    assert worked_here(made)
    made.apply(StageSetting("threads", 2), row_s=0.0005, block_bytes=100)
    assert (made.setting, made.place, made.num_workers, made.window) == (StageSetting("threads", 2), "threads", 2, 4)
    assert made.least_rows == 4
    assert not worked_here(made)
    made.apply(INLINE, row_s=0.0005, block_bytes=100)
    assert (made.setting, made.window, made.least_rows) == (INLINE, 1, 1)
    assert worked_here(made)
    assert looks == [made] * 3
    made.end()


def test_the_budgets_hold() -> None:
    made, budgets, _ = stage(cpu_budget=3, ram_budget=1000)
    budgets.threads.take(1)
    made.apply(StageSetting("threads", 5), row_s=0.0005, block_bytes=100)
    assert (made.setting, budgets.threads.free) == (StageSetting("threads", 2), 0)
    assert (made.charged_bytes, budgets.ram.free) == (400, 600)
    made.end()
    assert (budgets.threads.free, budgets.ram.free) == (2, 1000)


def test_without_any_thread_left_it_stays_inline() -> None:
    made, budgets, _ = stage(cpu_budget=1)
    budgets.threads.take(1)
    made.apply(StageSetting("threads", 2), row_s=0.0005, block_bytes=100)
    assert made.setting == INLINE
    assert worked_here(made)
    made.end()


def test_its_work_is_counted() -> None:
    made, _, _ = stage()
    for _ in range(3):
        worked_here(made)
    totals = made.totals
    assert (totals.rows, totals.blocks) == (18, 3)
    assert totals.busy_s > 0
    assert totals.num_bytes == 3 * (6 * 8 + 6)
    made.end()


def test_closing_it_leaves_it_for_the_next_pass() -> None:
    made, _, _ = stage()
    made.apply(StageSetting("threads", 1), row_s=0.0005, block_bytes=100)
    made.close()
    assert not worked_here(made)
    made.end()
