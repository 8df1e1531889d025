"""The pool of input workers on a local Ray."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from raydist.actors.workers.epoch_pools import IteratorPools, SharedExecutor
from raydist.actors.workers.handle import WorkerKind
from raydist.actors.workers.pool import ActorExecutor
from raydist.actors.workers.result_recipes import ResultColumn
from raydist.core.errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidArgumentError,
    RaydistError,
    UnavailableError,
)
from raydist.dataset import Dataset
from raydist.options import Options, Timeouts
from raydist.pipelines.run.iterator import DatasetIterator
from tests.conftest import live_actors
from tests.contracts import op
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@contextmanager
def opened(num_workers: int = 2, **given: Any) -> Iterator[ActorExecutor]:
    """A pool that a test closes, or whose workers it kills."""
    settings: dict[str, Any] = {"name": "test", "timeouts": Timeouts(element_s=20.0), **given}
    pool = ActorExecutor(num_workers, **settings)
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture(scope="module")
def pool(ray_cluster: None) -> Iterator[ActorExecutor]:
    """Shared by the tests that leave it as it is."""
    with opened() as pool:
        pool.start()
        yield pool


def iterate(dataset: Dataset, pool: ActorExecutor) -> DatasetIterator[Any]:
    """An iterator that leaves the pool open when it ends."""
    return op.iterate(dataset, lambda options: SharedExecutor(pool))


def test_values_and_functions_that_cannot_be_pickled_are_named(pool: ActorExecutor) -> None:
    lock = threading.Lock()

    def guarded(x: Any) -> Any:
        with lock:
            return x

    with pytest.raises(RaydistError, match="lock"):
        next(iterate(Dataset.range(2).map(lambda x: threading.Lock()), pool))
    with pytest.raises(InvalidArgumentError, match=r"guarded.*lock.*num_input_workers=0"):
        next(iterate(Dataset.range(2).map(guarded), pool))


def test_large_results_lie_in_the_object_store_and_users_get_their_own() -> None:
    dataset = Dataset.range(64).map(lambda x: np.full((250, 1000), x, np.float32)).batch(8)
    with opened() as pool:
        for batch in iterate(dataset, pool):
            batch += 1  # it is the user's own
        held = list(iterate(dataset, pool))
        assert [batch[:, 249, 999].tolist() for batch in held] == [list(range(k, k + 8)) for k in range(0, 64, 8)]
    assert held[0][0, 0, 0] == 0, "what is held outlives the pool"


def test_a_stage_reads_what_another_one_stored(pool: ActorExecutor) -> None:
    def keep(row: Any) -> Any:
        seen.append(row)  # in the worker: a user may keep what it is given
        row += 1
        return row

    seen: list[np.ndarray[Any, Any]] = []
    large = Dataset.range(64).map(lambda x: np.full(5_000, x, np.float32))
    dataset = large.shuffle(16, seed=3).batch(8).map(keep).unbatch().map(lambda row: row * 2)
    expected = [float(row[0]) for row in op.iterate(dataset)]
    assert sorted(expected) == [2.0 * (x + 1) for x in range(64)]
    assert [float(row[4_999]) for row in iterate(dataset, pool)] == expected


def test_what_was_read_is_let_go(pool: ActorExecutor) -> None:
    dataset = Dataset.range(128).map(lambda x: np.full(250_000, x, np.float32)).shuffle(4, seed=1).batch(8)
    held = []
    for _ in iterate(dataset, pool):
        columns = (each for each in gc.get_objects() if type(each) is ResultColumn)
        held.append(sum(column.row_bytes * column.shape[0] for column in columns))
    assert max(held) > 0
    assert max(held) < 96 << 20, "128 MB passed through"


def test_workers_that_cannot_start_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    start = WorkerKind.start

    def start_and_die(kind: WorkerKind, name: str, number: int = 0) -> Any:
        actor = start(kind, name)
        ray.kill(actor)
        return actor

    monkeypatch.setattr(WorkerKind, "start", start_and_die)
    message = r"test-.*-worker-19 is gone while starting, as were the 19 before"
    with opened(1, timeouts=Timeouts(start_s=20.0)) as pool, pytest.raises(UnavailableError, match=message):
        next(iterate(Dataset.range(1).map(abs), pool))


def test_a_stuck_function_reaches_the_limit() -> None:
    with opened(1, timeouts=Timeouts(element_s=0.5)) as pool:
        iterator = iterate(Dataset.range(3).map(lambda x: time.sleep(60)), pool)
        message = r"test.*worker-0.*Timeouts\.element_s.*map-1 \(test_pool\.py:.*stuck at element 0.*was killed"
        with pytest.raises(DeadlineExceededError, match=message):
            next(iterator)
        assert len(pool.worker_names) == 0, "the next block starts another one"


def test_closing_gives_up_what_is_waited_for(tmp_path: Path) -> None:
    def stuck(x: Any) -> Any:
        (tmp_path / "begun").touch()
        time.sleep(60)

    def close(pool: ActorExecutor) -> None:
        while not (tmp_path / "begun").exists():
            time.sleep(0.02)
        pool.close()

    with opened() as pool:
        closer = threading.Thread(target=close, args=(pool,))
        closer.start()
        with pytest.raises(CancelledError, match="closed"):
            next(iterate(Dataset.range(1).map(stuck), pool))
        closer.join()
        assert not pool.is_idle(0.0)
        with pytest.raises(CancelledError, match="closed"):
            next(iterate(Dataset.range(1).map(lambda x: x), pool))


def test_workers_that_do_not_fit_say_what_they_asked_for() -> None:
    limits, resources = Timeouts(start_s=1.0), {"unheard_of": 1}
    with opened(1, timeouts=limits, resources=resources) as pool, pytest.raises(DeadlineExceededError, match="unheard"):
        next(iterate(Dataset.range(1).map(lambda x: x), pool))


def test_a_pool_is_idle_only_between_its_blocks(pool: ActorExecutor) -> None:
    assert [int(x) for x in iterate(Dataset.range(5).map(lambda x: x), pool)] == [0, 1, 2, 3, 4]
    assert pool.is_idle(5.0)
    assert [worker.under_way for worker in pool._workers] == [(), ()], "the object store would keep what it has made"
    assert SharedExecutor(pool).window == pool.window == 4
    assert ActorExecutor(3).window == 6, "on each worker one block runs and one is on its way"
    assert pool.serves(2, {}, Timeouts(element_s=20.0))
    assert not pool.serves(3, {}, Timeouts(element_s=20.0))


def test_a_slow_block_holds_back_no_other_where_any_order_will_do(pool: ActorExecutor) -> None:
    def slow_first(x: Any) -> Any:
        time.sleep(0.5 if x == 0 else 0.001)
        return x

    dataset = Dataset.range(200).map(slow_first, deterministic=False)
    first = iterate(dataset, pool)
    begun = [int(next(first)) for _ in range(50)]
    assert begun[0] != 0
    resumed = iterate(dataset, pool)
    resumed.load_state_dict(first.state_dict())
    first.close()
    assert sorted(begun + [int(x) for x in resumed]) == list(range(200))


def on_workers(dataset: Dataset) -> Dataset:
    return dataset.with_options(Options(num_input_workers=1))


def test_the_next_epoch_finds_the_workers_of_the_last_one_and_of_one_that_was_left() -> None:
    before = live_actors()
    dataset = on_workers(Dataset.range(4).map(lambda x: os.getpid()))
    first = set(map(int, dataset))
    assert os.getpid() not in first
    assert set(map(int, dataset)) == first
    one, other = iter(dataset), iter(dataset)
    assert int(next(one)) != int(next(other)), "two at a time have a pool each"
    one.close()
    other.close()
    left = iter(dataset)
    next(left)
    left.close()
    assert set(map(int, dataset)) == first
    del dataset, one, other, left
    wait_until(lambda: live_actors() == before)


def read_one_and_close(pools: IteratorPools, close_first: bool = False) -> set[str]:
    """The actors that there are when an iterator on `pools` has its first element."""
    iterator = op.iterate(on_workers(Dataset.range(4).map(lambda x: x)), pools.open)
    assert next(iterator) == 0
    actors = live_actors()
    if close_first:
        pools.close()
    iterator.close()
    return actors


def test_a_pool_that_is_idle_for_a_while_or_comes_back_to_nobody_is_stopped() -> None:
    before = live_actors()
    pools = IteratorPools(kept_s=0.2)
    assert len(read_one_and_close(pools) - before) == 1
    wait_until(lambda: live_actors() == before)
    assert len(read_one_and_close(IteratorPools(), close_first=True) - before) == 1
    wait_until(lambda: live_actors() == before)
