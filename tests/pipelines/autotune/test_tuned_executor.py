"""The autotuner at work: on stages that sleep, so that threads help whatever else the machine does."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from raydist.core.errors import CancelledError
from raydist.dataset import Dataset
from raydist.options import AutotuneOptions, Options, ThreadingOptions
from raydist.pipelines.autotune.tuned_executor import (
    TunedExecutor,
    TunedPart,
    TunedPrefetch,
    TunedStage,
    local_executor,
)
from raydist.pipelines.autotune.tuner import Tuner
from raydist.pipelines.engine.budget import Budgets
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.engine.threads import ThreadExecutor
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.run.iterator import DatasetIterator
from raydist.pipelines.run.plan import open_iterator
from tests.contracts.op import iterate
from tests.pipelines.engine.toy_stages import SOURCE, block_of, spec_of


def map_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("raydist-map")]


def slow(x: int) -> int:
    time.sleep(0.001)
    return x + 1


def slower(x: int) -> int:
    time.sleep(0.004)
    return x + 1


def until_threads(iterator: Iterator[int], most: int = 2000) -> list[int]:
    """Elements up to the first that is made on a thread."""
    elements: list[int] = []
    while not map_threads() and len(elements) < most:
        elements.append(int(next(iterator)))
    return elements


def tuned(dataset: Dataset, tuners: list[Tuner] | None = None) -> DatasetIterator[Any]:
    return iterate(dataset, lambda options: TunedExecutor(tuners))


def test_a_stage_that_waits_moves_to_threads_and_gives_the_same_elements() -> None:
    with_budget = Options(autotune=AutotuneOptions(cpu_budget=3))
    iterator = tuned(Dataset.range(1000).map(slow).with_options(with_budget))
    assert [int(x) for x in iterator] == list(range(1, 1001))
    (reading,) = [reading for reading in iterator.meters.readings() if reading.place != "inline"]
    assert (reading.place, reading.parallelism) == ("threads", 3)
    assert iterator.meters.decisions[0].startswith("map-1 3 threads: the consumer waits")
    iterator.close()
    assert not map_threads()


def test_the_next_iteration_begins_with_what_was_learned() -> None:
    tuners: list[Tuner] = []
    dataset = Dataset.range(5000).map(slower).with_options(Options(autotune=AutotuneOptions(cpu_budget=2)))
    first = tuned(dataset, tuners)
    until_threads(first)
    for _ in range(200):
        next(first)
    until_threads(first)  # on a busy machine it may just look whether it does better without
    first.close()
    second = tuned(dataset, tuners)
    assert int(next(second)) == 1
    assert len(map_threads()) == 2
    second.close()


def test_an_abandoned_iterator_ends_its_threads() -> None:
    iterator = tuned(Dataset.range(5000).map(slow).with_options(Options(autotune=AutotuneOptions(cpu_budget=2))))
    until_threads(iterator)
    threads = map_threads()
    assert len(threads) == 2
    del iterator
    gc.collect()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_the_state_fits_whatever_was_decided() -> None:
    dataset = Dataset.range(3000).map(slow).batch(3).with_options(Options(autotune=AutotuneOptions(cpu_budget=2)))
    iterator = tuned(dataset)
    seen = 0
    while not map_threads():
        seen += len(next(iterator))
    state = iterator.state_dict()
    following = [next(iterator).tolist() for _ in range(5)]
    iterator.close()
    resumed = iterate(dataset)
    resumed.load_state_dict(state)
    assert [next(resumed).tolist() for _ in range(5)] == following
    assert following[0][0] == seen + 1
    resumed.close()


def test_a_parallelism_that_was_asked_for_is_kept() -> None:
    for calls in (1, 2):
        iterator = tuned(Dataset.range(300).map(slow, num_parallel_calls=calls))
        assert [int(x) for x in iterator] == list(range(1, 301))
        assert iterator.meters.decisions == []


def test_threads_that_were_asked_for_count_in_the_budget() -> None:
    most = 0

    def watched(x: int) -> int:
        nonlocal most
        most = max(most, len(map_threads()))
        return slow(x)

    dataset = Dataset.range(600).map(watched, num_parallel_calls=2).map(watched)
    iterator = tuned(dataset.with_options(Options(autotune=AutotuneOptions(cpu_budget=3))))
    assert [int(x) for x in iterator] == list(range(2, 602))
    assert 2 <= most <= 3


def test_a_closed_executor_takes_no_more_work() -> None:
    executor = TunedExecutor()
    block = block_of(SOURCE)
    spec = spec_of(SOURCE.map(lambda x: x))
    assert executor.submit(spec, block, (0,)).result().items[0].num_rows == block.num_rows  # type: ignore[union-attr]
    executor.close()
    with pytest.raises(CancelledError, match="needs an open executor"):
        executor.submit(spec, block, (0,))


def test_the_options_choose_the_executor() -> None:
    assert isinstance(local_executor(Options()), TunedExecutor)
    assert isinstance(local_executor(Options(autotune=AutotuneOptions(enabled=False))), InlineExecutor)
    assert isinstance(local_executor(Options(threading=ThreadingOptions(private_threadpool_size=0))), InlineExecutor)
    options = Options(threading=ThreadingOptions(private_threadpool_size=4))
    executor = local_executor(options)
    assert isinstance(executor, ThreadExecutor)
    assert executor.window == 4
    options.autotune.cpu_budget = 1
    assert isinstance(local_executor(options), InlineExecutor)


BLOCK = block_of(SOURCE)
WHERE = spec_of(SOURCE.map(lambda x: threading.current_thread() is threading.main_thread()))


def stage(cpu_budget: int | None = None, ram_budget: int | None = None) -> tuple[TunedStage, Budgets, list[TunedPart]]:
    budgets = Budgets(AutotuneOptions(cpu_budget=cpu_budget, ram_budget=ram_budget))
    looks: list[TunedPart] = []
    return TunedStage(IterationMeters().meter("map-1"), budgets, looks.append), budgets, looks


def worked_here(made: TunedStage) -> bool:
    result = made.submit(WHERE, BLOCK, (0,)).result()
    return bool(result.items[0].columns[0][0])  # type: ignore[union-attr]  # a block


def test_a_stage_works_where_it_was_told_to_and_is_counted() -> None:
    made, _, looks = stage()
    assert worked_here(made)
    made.apply(2, row_s=0.0005, block_bytes=100)
    assert (made.threads, made.place, made.num_workers, made.window, made.least_rows) == (2, "threads", 2, 4, 4)
    assert not worked_here(made)
    made.apply(0, row_s=0.0005, block_bytes=100)
    assert (made.threads, made.place, made.window, made.least_rows) == (0, "inline", 1, 1)
    assert worked_here(made)
    assert looks == [made] * 3
    done = made.take_activity()
    assert (done.rows, done.blocks, done.num_bytes) == (18, 3, 3 * (6 * 8 + 6))
    assert done.busy_s > 0
    assert made.take_activity().rows == 0
    made.end()


def test_a_stage_keeps_to_the_budgets() -> None:
    made, budgets, _ = stage(cpu_budget=3, ram_budget=1000)
    budgets.threads.take(1)
    made.apply(5, row_s=0.0005, block_bytes=100)
    assert (made.threads, budgets.threads.free) == (2, 0)
    assert (made.charged_bytes, budgets.ram.free) == (400, 600)
    made.end()
    assert (budgets.threads.free, budgets.ram.free) == (2, 1000)


def test_a_prefetch_needs_a_thread_in_the_budget_which_gives_itself_back_when_it_ends() -> None:
    budgets = Budgets(AutotuneOptions(cpu_budget=1))
    part = TunedPrefetch(IterationMeters().meter("prefetch-1"), budgets, lambda part: None, requested=False)
    part.apply(1)
    assert part.is_on
    part.apply(0)
    assert not part.is_on
    budgets.threads.take(1)
    part.apply(1)
    assert not part.is_on
    budgets.threads.give(1)
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
