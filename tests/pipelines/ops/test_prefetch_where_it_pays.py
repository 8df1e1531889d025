from __future__ import annotations

import gc
import time
from collections.abc import Callable

import numpy as np
import pytest

from raydist.dataset import Dataset
from raydist.options import AutotuneOptions, Options
from raydist.pipelines.autotune.tuned_executor import TunedExecutor
from raydist.pipelines.ops.prefetch import PrefetchOp
from tests.contracts.op import EXECUTORS, MakeExecutor, check_op, iterate
from tests.pipelines.restless_executor import RestlessExecutor
from tests.pipelines.threads import pipeline_threads


def ahead(dataset: Dataset) -> Dataset:
    return Dataset(PrefetchOp(dataset._op, injected=True))


def spoiled(x: int) -> int:
    return 100 // (int(x) - 4)


def restless(every: int) -> MakeExecutor:
    return lambda options: RestlessExecutor(options, every)


@pytest.mark.parametrize("every", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "make",
    [
        lambda: ahead(Dataset.range(20)),
        lambda: ahead(Dataset.range(30).map(spoiled).batch(3)),
        lambda: ahead(Dataset.range(12).shuffle(5).map(lambda x, *, rng: x + rng.integers(9)).repeat(2)),
    ],
)
def test_it_may_start_and_stop_between_any_two_blocks(make: Callable[[], Dataset], every: int) -> None:
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


def slow(x: int) -> int:
    time.sleep(0.002)
    return x


def test_it_reads_ahead_of_a_consumer_that_works() -> None:
    dataset = Dataset.range(400).map(slow, num_parallel_calls=1)
    got, begun = busy_consumer(dataset, 0.002, 400)
    assert got == list(range(400))
    assert begun < 400


def test_it_starts_no_thread_for_a_consumer_that_only_waits() -> None:
    dataset = Dataset.range(400).map(slow, num_parallel_calls=1)
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


@pytest.mark.parametrize("reads", [1, 4])
def test_an_abandoned_iterator_ends_its_thread(reads: int) -> None:
    iterator = iterate(ahead(Dataset.range(1000).repeat()), restless(3))
    for _ in range(3 + reads):
        next(iterator)
    begun = pipeline_threads()
    assert begun
    del iterator
    gc.collect()
    for thread in begun:
        thread.join(10)
        assert not thread.is_alive()


def test_where_nobody_decides_it_is_its_input() -> None:
    iterator = iterate(ahead(Dataset.range(5)))
    assert np.array_equal(list(iterator), range(5))
    assert not pipeline_threads()
