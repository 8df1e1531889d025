from __future__ import annotations

from raydist.dataset import Dataset
from raydist.options import AutotuneOptions, Options
from raydist.pipelines.autotune.model import INLINE, StageSetting
from raydist.pipelines.autotune.tuned_executor import TunedPrefetch
from raydist.pipelines.autotune.tuned_part import TunedPart
from raydist.pipelines.engine.budget import Budgets
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.run.plan import open_iterator

ON = StageSetting("threads", 1)


def prefetch(cpu_budget: int) -> tuple[TunedPrefetch, Budgets, list[TunedPart]]:
    options = Options(autotune=AutotuneOptions(cpu_budget=cpu_budget))
    budgets = Budgets(options.autotune)
    looks: list[TunedPart] = []
    return TunedPrefetch(IterationMeters().meter("prefetch-1"), budgets, looks.append), budgets, looks


def apply(part: TunedPrefetch, setting: StageSetting) -> None:
    part.apply(setting, row_s=0.001, block_bytes=10)


def test_its_thread_is_taken_from_the_budget() -> None:
    part, budgets, _ = prefetch(1)
    apply(part, ON)
    assert (part.setting, budgets.threads.free) == (ON, 0)
    apply(part, INLINE)
    assert (part.setting, budgets.threads.free) == (INLINE, 1)
    budgets.threads.take(1)
    apply(part, ON)
    assert part.setting == INLINE


def test_a_thread_that_runs_gives_itself_back_when_it_ends() -> None:
    part, budgets, _ = prefetch(1)
    apply(part, ON)
    op = Dataset.range(100).repeat()._op
    source = open_iterator(op, seed=0, epoch=0, options=Options(), executor=InlineExecutor())
    ahead = part.read_ahead(source, 4)
    ahead.start()
    assert ahead.get() is not None
    apply(part, INLINE)
    assert budgets.threads.free == 0
    ahead.stop()
    assert budgets.threads.free == 1
    assert part.totals.busy_s > 0


def test_blocks_are_counted_and_looked_at() -> None:
    part, _, looks = prefetch(1)
    part.look()
    part.handed_out(5, 40)
    assert looks == [part]
    assert (part.totals.rows, part.totals.blocks, part.totals.num_bytes) == (5, 1, 40)
