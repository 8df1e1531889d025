from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from raydist.actors.workers.epoch_pools import IteratorPools
from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.elements.spec import TensorSpec
from tests.conftest import live_actors
from tests.contracts.op import iterate
from tests.pipelines.threads import in_threads

pytestmark = pytest.mark.usefixtures("ray_cluster")


def on_workers(dataset: Dataset) -> Dataset:
    return dataset.with_options(Options(num_input_workers=1))


def process_ids(dataset: Dataset) -> set[int]:
    return {int(x) for x in dataset}


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(200):
        if condition():
            return
        threading.Event().wait(0.05)
    assert condition(), "It did not happen within 10 s."


def test_the_next_epoch_finds_the_workers_of_the_last_one() -> None:
    before = live_actors()
    dataset = on_workers(Dataset.range(4).map(lambda x: os.getpid()))
    first = process_ids(dataset)
    assert os.getpid() not in first
    assert process_ids(dataset) == first
    del dataset
    wait_until(lambda: live_actors() == before)


def test_an_iterator_that_was_left_brings_its_workers_back() -> None:
    dataset = on_workers(Dataset.range(4).map(lambda x: os.getpid()).repeat())
    iterator = iter(dataset)
    worker = int(next(iterator))
    iterator.close()
    assert int(next(iter(dataset))) == worker


def test_two_iterators_at_a_time_have_a_pool_each() -> None:
    dataset = on_workers(Dataset.range(4).map(lambda x: os.getpid()))
    first, second = iter(dataset), iter(dataset)
    assert int(next(first)) != int(next(second))
    first.close()
    second.close()
    del dataset, first, second
    gc.collect()
    wait_until(lambda: not any(thread.name == "raydist-idle-pool" for thread in threading.enumerate()))


def read_one_and_close(pools: IteratorPools, close_first: bool = False) -> set[str]:
    """The actors that there are when an iterator on `pools` has its first element."""
    iterator = iterate(on_workers(Dataset.range(4).map(lambda x: x)), pools.open)
    assert next(iterator) == 0
    actors = live_actors()
    if close_first:
        pools.close()
    iterator.close()
    return actors


def test_an_idle_pool_is_stopped_after_a_while() -> None:
    before = live_actors()
    pools = IteratorPools(kept_s=0.2)
    assert len(read_one_and_close(pools) - before) == 1
    wait_until(lambda: live_actors() == before)


def test_a_pool_that_comes_back_to_nobody_is_stopped() -> None:
    before = live_actors()
    assert len(read_one_and_close(IteratorPools(), close_first=True) - before) == 1
    wait_until(lambda: live_actors() == before)


def first_two(window: Dataset) -> Dataset:
    return window.take(2).shuffle(2)


def parts(x: np.int64) -> dict[str, object]:
    return {"z": Dataset.range(9).shuffle(9), "a": np.array([x, 0.5], TensorSpec((), "bfloat16").dtype)}


def test_datasets_and_small_floats_are_elements_on_workers_too() -> None:
    def read(dataset: Dataset) -> list[tuple[list[str], list[int], list[float]]]:
        rows = [(list(row), [int(x) for x in row["z"]], row["a"].tolist()) for row in dataset]
        assert {row["a"].dtype for row in dataset.take(1)} == {torch.bfloat16}
        return rows

    dataset = Dataset.range(8).filter(lambda x: bool(x % 2)).map(parts).with_options(Options(seed=3))
    found = read(on_workers(dataset))
    assert found == read(dataset.take(-1))
    assert [row[0] for row in found] == [["z", "a"]] * 4
    windows = Dataset.range(6).window(3).map(first_two).with_options(Options(seed=3))
    orders = [[[int(x) for x in window] for window in made] for made in (on_workers(windows), windows)]
    assert orders[0] == orders[1]


def test_threads_may_share_an_iterator_over_workers() -> None:
    iterator = iter(on_workers(Dataset.range(400).map(lambda x: x + 1)))
    found: list[int] = []
    in_threads(5, lambda: found.extend(map(int, iterator)))
    assert sorted(found) == list(range(1, 401))
