from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest

from raydist.core.errors import InvalidArgumentError, UnavailableError
from raydist.core.values import AUTOTUNE
from raydist.dataset import Dataset
from raydist.options import AutotuneOptions, Options
from tests.contracts.op import collect, iterate
from tests.pipelines.model import recorder
from tests.pipelines.threads import pipeline_threads


def wait_until(condition: Callable[[], bool]) -> bool:
    limit = time.monotonic() + 10
    while not condition() and time.monotonic() < limit:
        time.sleep(0.001)
    return condition()


@pytest.mark.parametrize("size", [None, AUTOTUNE, 0, 1, 3, 100])
def test_elements_are_unchanged(size: int | None) -> None:
    assert [int(x) for x in Dataset.range(20).map(lambda x: x + 1).prefetch(size)] == list(range(1, 21))


def test_buffer_size_is_checked() -> None:
    with pytest.raises(InvalidArgumentError, match="buffer_size must be >= 0.*got -2"):
        Dataset.range(3).prefetch(-2)


def test_it_works_ahead_and_no_further_than_its_buffer() -> None:
    made: list[int] = []
    iterator = iter(Dataset.range(100).map(recorder(made)).prefetch(4))
    next(iterator)
    assert wait_until(lambda: len(made) >= 5)
    next(iterator)
    assert wait_until(lambda: len(made) >= 6)
    assert len(made) <= 8
    iterator.close()


def test_the_thread_ends_with_the_data_with_close_and_with_the_iterator() -> None:
    dataset = Dataset.range(50).repeat().prefetch(2)
    list(dataset.take(3))
    assert wait_until(lambda: not pipeline_threads())
    iterator = iter(dataset)
    next(iterator)
    assert pipeline_threads()
    iterator.close()
    assert not pipeline_threads()
    iterator = iter(dataset)
    next(iterator)
    assert pipeline_threads()
    del iterator
    gc.collect()
    assert wait_until(lambda: not pipeline_threads())


def test_threads_of_parallel_maps_end_too() -> None:
    iterator = iter(Dataset.range(50).map(lambda x: x, num_parallel_calls=2).prefetch(2))
    next(iterator)
    assert len(pipeline_threads()) == 3
    iterator.close()
    assert not pipeline_threads()
    iterator = iter(Dataset.range(50).map(lambda x: x, num_parallel_calls=2))
    next(iterator)
    del iterator
    gc.collect()
    assert wait_until(lambda: not pipeline_threads())


def test_errors_come_in_their_place() -> None:
    items = collect(iterate(Dataset.range(4).map(lambda x: 4 // int(x)).prefetch(3)))
    assert items[0][0] == "ZeroDivisionError"
    assert [int(x) for x in items[1:]] == [4, 2, 1]


def test_an_error_of_the_machinery_is_raised_and_can_be_tried_again() -> None:
    class Flaky:
        tries = 0

    def lost(x: int) -> int:
        if x == 2 and Flaky.tries < 2:
            Flaky.tries += 1
            raise UnavailableError("worker 3 is gone")
        return x

    # What a pool raises when a worker died; a function that raises it is the shortest way to one.
    items = collect(iterate(Dataset.range(5).map(lost).batch(2).prefetch(1)))
    assert [item[0] if isinstance(item, tuple) else item.tolist() for item in items] == [
        [0, 1],
        "UnavailableError",
        "UnavailableError",
        [2, 3],
        [4],
    ]


def test_an_exit_in_the_thread_is_not_the_end_of_the_data() -> None:
    iterator = iterate(Dataset.range(5).map(lambda x: exit(3) if x == 2 else x).prefetch(1))
    with pytest.raises(SystemExit):
        collect(iterator)
    iterator.close()


def test_without_autotuning_the_buffer_stays_small() -> None:
    made: list[int] = []
    dataset = Dataset.range(100).map(recorder(made)).prefetch()
    iterator = iter(dataset.with_options(Options(autotune=AutotuneOptions(enabled=False))))
    for _ in range(5):
        next(iterator)
    assert wait_until(lambda: len(made) >= 7)
    assert len(made) <= 9
    iterator.close()
