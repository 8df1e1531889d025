from __future__ import annotations

from dataclasses import replace

import pytest

from raydist.actors.workers.growing_executor import PoolGrowth, PoolPeriod

STARVING = PoolPeriod(rate=100.0, waits=0.9, awaited=0.5, idle_cores=4.0)


def grown(best: int, most: int, periods: int = 60) -> list[int]:
    """Sizes of a pool that gets faster up to `best` workers."""
    growth = PoolGrowth(2, most)
    sizes = [2]
    for _ in range(periods):
        growth.step(replace(STARVING, rate=100.0 * min(growth.num_workers, best)))
        sizes += [growth.num_workers] if growth.num_workers != sizes[-1] else []
    return sizes


def test_it_grows_while_that_helps_and_then_leaves_it() -> None:
    assert grown(best=4, most=8) == [2, 3, 4, 5, 4]


def test_it_keeps_its_limit() -> None:
    assert grown(best=8, most=3) == [2, 3]


@pytest.mark.parametrize("change", [{"waits": 0.4}, {"awaited": 0.05}, {"idle_cores": 0.5}])
def test_it_grows_only_for_a_consumer_that_waits_for_it_on_cores_that_are_free(change: dict[str, float]) -> None:
    growth = PoolGrowth(2, 8)
    assert not any(growth.step(replace(STARVING, **change)) for _ in range(20))
    assert growth.num_workers == 2


def test_a_new_worker_is_given_time_to_start() -> None:
    growth = PoolGrowth(2, 8)
    assert growth.step(STARVING) == "3 input workers: the consumer waits 90% of the time"
    assert [growth.step(replace(STARVING, rate=1.0)) for _ in range(3)] == ["", "", ""]
    assert growth.step(replace(STARVING, rate=90.0)) == "2 input workers: one more gave -10%"
