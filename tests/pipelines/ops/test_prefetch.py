"""Reading ahead: buffers and threads."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, final

import numpy as np
import pytest

from raydist.core.errors import UnavailableError
from raydist.core.values import AUTOTUNE
from raydist.dataset import Dataset
from raydist.options import AutotuneOptions, Options
from raydist.pipelines.autotune.tuned_executor import (
    TunedExecutor,
    TunedPart,
    TunedPrefetch,
    TunedStage,
    local_executor,
)
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.engine.budget import Budgets
from raydist.pipelines.engine.executor import Executor, InlineExecutor, Pending
from raydist.pipelines.engine.kernel import StageSpec
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.metering.meter import Meter
from raydist.pipelines.ops.prefetch import PrefetchOp
from tests.contracts.op import EXECUTORS, MakeExecutor, check_op, collect, iterate
from tests.pipelines.tables import outline, recorder
from tests.pipelines.threads import pipeline_threads

FIXED = Options(autotune=AutotuneOptions(enabled=False))


def wait_until(condition: Callable[[], bool]) -> bool:
    limit = time.monotonic() + 10
    while not condition() and time.monotonic() < limit:
        time.sleep(0.001)
    return condition()


def test_it_works_ahead_and_no_further_than_its_buffer() -> None:
    for size, options in ((4, Options()), (None, FIXED)):
        made: list[int] = []
        iterator = iter(Dataset.range(100).map(recorder(made)).prefetch(size).with_options(options))
        for _ in range(5):
            next(iterator)
        assert wait_until(lambda: len(made) >= 7)  # noqa: B023 - called in this turn
        assert len(made) <= 5 + (size or 2) + 2, "the buffer, and what is under way"
        iterator.close()


ENDLESS = Dataset.range(50).repeat()
MAPPED = ENDLESS.map(lambda x: x, num_parallel_calls=2)


@pytest.mark.parametrize(("dataset", "threads"), [(ENDLESS.prefetch(2), 1), (MAPPED.prefetch(2), 3), (MAPPED, 2)])
def test_threads_end_with_the_data_with_close_and_with_the_iterator(dataset: Dataset, threads: int) -> None:
    list(dataset.take(3))
    assert wait_until(lambda: not pipeline_threads())
    iterator = iter(dataset)
    next(iterator)
    assert len(pipeline_threads()) >= threads
    iterator.close()
    assert not pipeline_threads()
    iterator = iter(dataset)
    next(iterator)
    del iterator
    gc.collect()
    assert wait_until(lambda: not pipeline_threads())


def test_an_exit_in_the_thread_is_not_the_end_of_the_data() -> None:
    iterator = iterate(Dataset.range(5).map(lambda x: exit(3) if x == 2 else x).prefetch(1))
    with pytest.raises(SystemExit):
        collect(iterator)
    iterator.close()


def test_an_error_of_the_machinery_is_raised_and_can_be_tried_again() -> None:
    tries: list[int] = []

    def lost(x: int) -> int:
        if x == 2 and len(tries) < 2:
            tries.append(x)
            raise UnavailableError("worker 3 is gone")
        return x

    # What a pool raises when a worker died; a function that raises it is the shortest way to one.
    dataset = Dataset.range(5).map(lost).batch(2).prefetch(1)
    assert outline(dataset) == [[0, 1], "UnavailableError", "UnavailableError", [2, 3], [4]]


def short(start: Any) -> Dataset:
    return Dataset.range(start, start + 50)


def slow(x: np.int64) -> np.int64:
    time.sleep(0.002)
    return x


def most_threads(dataset: Dataset) -> int:
    most = 0
    for _ in iterate(dataset, local_executor):
        most = max(most, len(pipeline_threads()))
    return most


def test_what_is_cheap_starts_threads_only_where_nothing_may_be_tuned() -> None:
    for dataset, fixed in (
        (Dataset.range(500).prefetch(AUTOTUNE), 1),
        (Dataset.range(500).map(lambda x: x).batch(5).prefetch(), 1),
        (Dataset.range(8).interleave(short, cycle_length=3, num_parallel_calls=AUTOTUNE), 3),
    ):
        # A pass that something disturbs may take it for slow.
        assert any(most_threads(dataset) == 0 for _ in range(5)), dataset
        assert most_threads(dataset.with_options(FIXED)) == fixed, dataset


def test_what_waits_is_read_by_pipeline_threads() -> None:
    def waiting(start: Any) -> Dataset:
        return short(start).map(slow)

    dataset = Dataset.range(6).interleave(waiting, cycle_length=3, num_parallel_calls=AUTOTUNE)
    assert most_threads(dataset) == 3
    assert [int(x) for x in dataset] == [int(x) for x in Dataset.range(6).interleave(short, cycle_length=3)]


def ahead(dataset: Dataset) -> Dataset:
    return Dataset(PrefetchOp(dataset._op, injected=True))


def spoiled(x: int) -> int:
    return 100 // (int(x) - 4)


def restless(every: int) -> MakeExecutor:
    return lambda options: RestlessExecutor(options, every)


@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_it_may_start_and_stop_between_any_two_blocks(every: int) -> None:
    makers: list[Callable[[], Dataset]] = [
        lambda: ahead(Dataset.range(20)),
        lambda: ahead(Dataset.range(30).map(spoiled).batch(3)),
        lambda: ahead(Dataset.range(12).shuffle(5).map(lambda x, *, rng: x + rng.integers(9)).repeat(2)),
    ]
    for make in makers:
        check_op(make, executors=(restless(every), EXECUTORS[0]))


def busy_consumer(dataset: Dataset, seconds: float, most: int) -> tuple[list[int], int]:
    """Takes elements and works on each; what it got, and when a thread began to read ahead."""
    begun, got = most, []
    for number, x in enumerate(iterate(dataset, lambda options: TunedExecutor())):
        got.append(int(x))
        if begun == most and pipeline_threads():
            begun = number
        if seconds:
            time.sleep(seconds)
    return got, begun


def test_it_reads_ahead_of_a_consumer_that_works_and_not_of_one_that_only_waits() -> None:
    dataset = Dataset.range(400).map(slow, num_parallel_calls=1)
    got, begun = busy_consumer(dataset, 0.002, 400)
    assert got == list(range(400))
    assert begun < 400
    got, begun = busy_consumer(dataset, 0.0, 400)
    assert got == list(range(400))
    assert begun == 400


def test_its_thread_counts_in_the_budget() -> None:
    dataset = ahead(Dataset.range(100).map(slow, num_parallel_calls=2))
    options = Options(autotune=AutotuneOptions(cpu_budget=2))
    iterator = iterate(dataset.with_options(options), restless(2))
    for _ in range(50):
        next(iterator)
        assert len(pipeline_threads()) <= 2
    iterator.close()
    assert not pipeline_threads()


__all__ = ["RestlessExecutor"]


@final
class RestlessExecutor(Executor):
    """Moves every stage to threads and back, and starts and stops reading ahead, after every `every` blocks."""

    window = 1

    def __init__(self, options: Options, every: int = 2) -> None:
        self._every = every
        self._looks = 0
        self.parts: list[TunedPart] = []

    def for_stage(self, meter: Meter, meters: IterationMeters, budgets: Budgets) -> Executor:
        stage = TunedStage(meter, budgets, self._look)
        self.parts.append(stage)
        return stage

    def for_prefetch(self, meter: Meter, meters: IterationMeters, budgets: Budgets, **settings: Any) -> TunedPrefetch:
        prefetch = TunedPrefetch(meter, budgets, self._look, **settings)
        self.parts.append(prefetch)
        return prefetch

    def _look(self, part: TunedPart) -> None:
        self._looks += 1
        if self._looks % self._every == 0:
            part.apply(0 if part.threads else 2, row_s=0.001, block_bytes=100)

    def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        return InlineExecutor().submit(spec, block, starts)

    def close(self) -> None:
        for part in self.parts:
            part.end()
