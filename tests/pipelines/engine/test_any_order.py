"""`deterministic=False`: any order, every element once, also when resuming."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raydist.core.errors import FailedPreconditionError
from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.engine.arrival_order import ArrivalOrders
from raydist.pipelines.engine.executor import Executor
from tests.contracts.op import collect, is_error, iterate
from tests.pipelines.engine.toy_stages import ToyPool

ANY_ORDER = Options(deterministic=False)


def fails_sometimes(x: np.int64) -> tuple[Any, float]:
    return x, 1 / float(x % 7)


def rows_of(number: np.int64) -> Dataset:
    first = 10 * int(number)
    return Dataset.range(first, first + int(number)).map(lambda x: x)


DATASETS: dict[str, Dataset] = {
    "large results": Dataset.range(60).map(lambda x: np.full(1 << 17, x)),
    "map with errors": Dataset.range(60).map(fails_sometimes),
    "map behind a batch": Dataset.range(60).map(lambda x: x).batch(3).map(lambda x: x * 2),
    "stages in a row": Dataset.range(60).filter(lambda x: x % 2).map(lambda x, *, rng: x),
    "prefetch": Dataset.range(60).map(lambda x: x).prefetch(5).batch(4),
    "repeat": Dataset.range(20).shuffle(5).map(lambda x: x).repeat(3),
    "take": Dataset.range(90).map(lambda x: x).skip(3).take(50),
    "below a shuffle": Dataset.range(60).map(lambda x: x).shuffle(10).map(lambda x: x),
    "interleave": Dataset.range(7).interleave(rows_of, 3, 2, num_parallel_calls=3).batch(2).map(lambda x: x),
}


@pytest.mark.parametrize("window", [1, 2, 5])
def test_a_state_of_a_wide_window_goes_on_in_a_narrow_one(window: int) -> None:
    """The input reads all blocks again; the stage skips those that were handed out before older ones."""
    dataset = Dataset.range(60).map(lambda x: x).with_options(ANY_ORDER)
    for seed in range(8):
        got: list[Any] = []
        state: dict[str, Any] | None = None
        for pool, count in ((ToyPool(6, seed), 20), (ToyPool(window, 1), 5), (ToyPool(3, 2), 60)):
            iterator = iterate(dataset, lambda options, pool=pool: pool)  # type: ignore[misc]  # a default
            if state is not None:
                iterator.load_state_dict(state)
            got += collect(iterator, count)
            state = iterator.state_dict()
            iterator.close()
        assert sorted(int(x) for x in got) == list(range(60)), f"seed {seed}"


def flat(items: list[Any]) -> list[Any]:
    """Return all elements and errors without their batches, sorted; of large elements the first entries."""
    parts = [item[:9] if isinstance(item, np.ndarray) else [item] for item in items]
    return sorted(str(x) for part in parts for x in part)


@pytest.mark.parametrize("name", DATASETS)
def test_nothing_is_lost_or_doubled_wherever_one_stops(name: str) -> None:
    dataset = DATASETS[name].with_options(ANY_ORDER)
    pools = iter(range(10**6))

    def pool(options: Options) -> Executor:
        return ToyPool(4, next(pools))

    expected = flat(collect(iterate(DATASETS[name])))
    first = iterate(dataset, pool)
    begun: list[Any] = []
    while True:
        state = json.dumps(first.state_dict())
        assert len(state) < 3_000
        resumed = iterate(dataset, pool, epoch=99)
        resumed.load_state_dict(json.loads(state))
        assert json.dumps(resumed.state_dict()) == state
        rest = collect(resumed, 5)
        resumed.load_state_dict(json.loads(json.dumps(resumed.state_dict())))  # once more, while notes are followed
        rest += collect(resumed)
        resumed.close()
        if name == "take":  # of any 53 elements, the first three are passed over
            assert len(set(flat(begun + rest))) == 50
        else:
            assert flat(begun + rest) == expected, f"resumed after {len(begun)}"
        more = collect(first, 1)
        if not more:
            break
        begun += more
    first.close()


def test_the_order_is_another_one_where_it_may_be() -> None:
    numbers = Dataset.range(200)
    items = collect(iterate(numbers.map(lambda x: x, deterministic=False), lambda options: ToyPool(4, 1)))
    assert items != sorted(items)
    assert sorted(items) == list(range(200))
    for dataset in (
        numbers.map(lambda x: x, deterministic=True).with_options(ANY_ORDER),
        numbers.map(lambda x: x),
        numbers.map(lambda x: x).scan(0, lambda total, x: (total, x)).with_options(ANY_ORDER),  # its states reach back
    ):
        assert collect(iterate(dataset, lambda options: ToyPool(4, 1))) == list(range(200))


def test_a_slow_element_does_not_hold_back_others() -> None:
    release = threading.Event()

    def waits(x: int) -> int:
        if x == 0:
            release.wait(50)
        return x

    iterator = iterate(Dataset.range(30).map(waits, num_parallel_calls=2, deterministic=False))
    early = [int(next(iterator)) for _ in range(29)]
    release.set()
    assert sorted(early) == list(range(1, 30))
    assert int(next(iterator)) == 0
    assert collect(iterator) == []


def test_an_input_that_is_another_one_is_an_error() -> None:
    def woven(count: int) -> Dataset:  # the states of so many are too long to be saved: all are read again
        return Dataset.range(60).interleave(lambda x: Dataset.range(count).shuffle(5).map(lambda y: y), 60)

    makers: list[tuple[Callable[[int], Dataset], int]] = [
        (lambda count: Dataset.range(count).map(lambda x: x, deterministic=False), 20),
        (woven, 250),
        (lambda count: Dataset.range(count).scan(0, lambda total, x: (total + x, x)), 20),
    ]
    for of, read in makers:
        iterator, other = (iterate(of(count), lambda options: ToyPool(4, 3)) for count in (50, 2))
        assert not any(map(is_error, collect(iterator, read)))
        other.load_state_dict(iterator.state_dict())
        with pytest.raises(FailedPreconditionError, match="the same (elements )?again to resume"):
            next(other)


def test_notes_of_thousands_of_turns_fit_into_a_state() -> None:
    orders, draw = ArrivalOrders(), random.Random(0)
    order = orders.of("interleave-1@0")
    numbers = [given + draw.choice([0, 0, 0, 1, 2, 3]) for given in range(5000)]
    for given, number in enumerate(numbers):
        order.was_read(given, 1)
        order.was_given(given, number)
    notes = orders.since({"order": "interleave-1@0", "first": 0, "given": 0})
    assert len(json.dumps(notes)) < 4_000
    again = ArrivalOrders()
    again.load(notes)
    assert [again.of("interleave-1@0").number_at(given) for given in range(5000)] == numbers
