from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from raydist.core.values import AUTOTUNE
from raydist.dataset import Dataset
from raydist.options import AutotuneOptions, Options
from raydist.pipelines.autotune.tuned_executor import local_executor
from tests.contracts.op import iterate
from tests.pipelines.threads import pipeline_threads

FIXED = Options(autotune=AutotuneOptions(enabled=False))


def short(start: Any) -> Dataset:
    return Dataset.range(start, start + 50)


def slow(x: np.int64) -> np.int64:
    time.sleep(0.004)
    return x


def most_threads(dataset: Dataset) -> int:
    most = 0
    for _ in iterate(dataset, local_executor):
        most = max(most, len(pipeline_threads()))
    return most


@pytest.mark.parametrize(
    ("dataset", "fixed"),
    [
        (Dataset.range(500).prefetch(AUTOTUNE), 1),
        (Dataset.range(500).map(lambda x: x).batch(5).prefetch(), 1),
        (Dataset.range(8).interleave(short, cycle_length=3, num_parallel_calls=AUTOTUNE), 3),
    ],
)
def test_what_is_cheap_starts_threads_only_where_nothing_may_be_tuned(dataset: Dataset, fixed: int) -> None:
    assert min(most_threads(dataset) for _ in range(5)) == 0  # a pass that something disturbs may take it for slow
    assert most_threads(dataset.with_options(FIXED)) == fixed


def test_what_waits_is_read_by_pipeline_threads() -> None:
    def waiting(start: Any) -> Dataset:
        return short(start).map(slow)

    dataset = Dataset.range(6).interleave(waiting, cycle_length=3, num_parallel_calls=AUTOTUNE)
    assert most_threads(dataset) == 3
    assert [int(x) for x in dataset] == [int(x) for x in Dataset.range(6).interleave(short, cycle_length=3)]


def test_stats_show_threads_where_there_are_some() -> None:
    waiting = Dataset.range(100).map(slow, num_parallel_calls=1)
    for dataset, expected in ((Dataset.range(100), "stage"), (waiting, "prefetch")):
        iterator = iter(dataset.prefetch(AUTOTUNE))
        for _ in range(60):
            next(iterator)
            time.sleep(0.004 if expected == "prefetch" else 0)
        kinds = [stage.kind for stage in iterator.stats().stages]
        iterator.close()
        assert kinds[-1] == expected
