"""`interleave(deterministic=False)`: takes what is there, loses nothing, resumes exactly."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np

from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.engine.arrival_order import ArrivalOrder
from raydist.pipelines.ops.cycle import CycleTurns, Turn
from tests.contracts.op import collect, iterate


def rows_of(number: np.int64) -> Dataset:
    first = 10 * int(number)
    return Dataset.range(first, first + int(number)).map(lambda x: x)


def test_notes_are_followed() -> None:
    order = ArrivalOrder()
    order.was_given(0, 2)
    order.was_read(0, 5)
    turns = CycleTurns(order, "interleave-1@0")
    assert turns.choose(3, [None] * 4, may_fill=True) == Turn(1, 5)
    turns.took(5)
    assert turns.choose(2, [None] * 4, may_fill=False) == Turn(2, None)
    assert turns.state_dict() == {"order": "interleave-1@0", "first": 1, "given": 1}


def test_a_slow_dataset_does_not_hold_back_others() -> None:
    release = threading.Event()

    def waits(x: np.int64) -> np.int64:
        if x == 0:
            release.wait(50)
        return x

    dataset = Dataset.range(3).interleave(
        lambda n: Dataset.range(10 * n, 10 * n + 5).map(waits), 3, num_parallel_calls=3, deterministic=False
    )
    iterator = iterate(dataset)
    early = [int(next(iterator)) for _ in range(10)]
    release.set()
    assert sorted(early) == [10, 11, 12, 13, 14, 20, 21, 22, 23, 24]
    assert collect(iterator) == [0, 1, 2, 3, 4]


def test_nothing_is_lost_or_doubled_wherever_one_stops() -> None:
    dataset = Dataset.range(7).interleave(rows_of, 3, 2, num_parallel_calls=3).batch(2).map(lambda x: x)
    expected = sorted(int(x) for batch in collect(iterate(dataset)) for x in batch)
    free = dataset.with_options(Options(deterministic=False))
    first = iterate(free)
    begun: list[Any] = []
    while True:
        state = json.dumps(first.state_dict())
        assert len(state) < 10_000
        resumed = iterate(free, epoch=99)
        resumed.load_state_dict(json.loads(state))
        assert json.dumps(resumed.state_dict()) == state
        rest = collect(resumed)
        resumed.close()
        assert sorted(int(x) for batch in begun + rest for x in batch) == expected, f"resumed after {len(begun)}"
        more = collect(first, 1)
        if not more:
            break
        begun += more
    first.close()
