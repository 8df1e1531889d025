"""The pool of input workers on a local Ray."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
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


def pid_of(pool: ActorExecutor, index: int = 0) -> int:
    actor: Any = ray.get_actor(pool.worker_names[index])
    pid: int = ray.get(actor.hello.remote())
    return pid


class OddError(Exception):
    """Cannot be unpickled."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"odd {first} {second}")


def test_errors_keep_type_and_place_and_name_the_worker(pool: ActorExecutor) -> None:
    def fail(x: Any) -> Any:
        if x == 4:
            raise KeyError("four")
        if x == 6:
            raise OddError(1, 2)
        return x

    iterator = iterate(Dataset.range(8).map(fail), pool)
    assert [int(next(iterator)) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(KeyError, match="four") as caught:
        next(iterator)
    notes = "\n".join(caught.value.__notes__)
    assert "map-1" in notes
    assert "element 4" in notes
    assert f"In {pool._name}-worker-" in notes
    assert int(next(iterator)) == 5
    with pytest.raises(OddError, match="odd 1 2"):
        next(iterator)
    assert [int(x) for x in iterator] == [7]


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


def test_a_worker_that_is_killed_is_replaced_and_takes_no_result_with_it() -> None:
    def slow(x: Any) -> Any:
        time.sleep(0.005)
        return np.full((50, 1000), x, np.float32)

    with opened() as pool:
        iterator = iterate(Dataset.range(160).map(slow).batch(4), pool)
        first = next(iterator)
        killed, other = pool.worker_names
        os.kill(pid_of(pool, 0), signal.SIGKILL)
        rest = list(iterator)
        assert [int(batch[k, 0, 0]) for batch in (first, *rest) for k in range(4)] == list(range(160))
        assert killed not in pool.worker_names
        assert other in pool.worker_names


def test_a_worker_that_is_killed_while_it_starts_is_replaced() -> None:
    with opened(timeouts=Timeouts(start_s=20.0)) as pool:
        pool.start()
        before = pool.worker_names
        for name in before:
            ray.kill(ray.get_actor(name))
        assert [int(x) for x in iterate(Dataset.range(40).map(abs), pool)] == list(range(40))
        assert not set(before) & set(pool.worker_names)


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


def test_kills_from_outside_are_not_blamed_on_the_function(tmp_path: Path) -> None:
    tried = tmp_path / "tries"
    tried.touch()

    def slow(x: Any) -> Any:
        if x == 3:
            with tried.open("a") as tries:
                tries.write(f"{os.getpid()}\n")
            time.sleep(0.5)
        return x

    def kill_two() -> None:
        killed: set[str] = set()
        while len(killed) < 2:
            time.sleep(0.02)
            for pid in set(tried.read_text().splitlines()) - killed:
                os.kill(int(pid), signal.SIGKILL)
                killed.add(pid)

    killer = threading.Thread(target=kill_two)
    killer.start()
    with opened() as pool:
        assert [int(x) for x in iterate(Dataset.range(6).map(slow), pool)] == list(range(6))
    killer.join()
    assert len(tried.read_text().split()) == 3


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


def test_the_next_iteration_knows_how_large_blocks_should_be() -> None:
    dataset = Dataset.range(3_000).map(lambda x: x + 1).batch(10)
    with opened() as pool:
        assert len(list(iterate(dataset, pool))) == 300
        (size,) = pool._sizes.values()
        assert size.rows(10, 4, 1) > 64
        assert len(list(iterate(dataset, pool))) == 300
        assert list(pool._sizes.values()) == [size]


def on_workers(dataset: Dataset) -> Dataset:
    return dataset.with_options(Options(num_input_workers=1))


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(200):
        if condition():
            return
        threading.Event().wait(0.05)
    assert condition(), "It did not happen within 10 s."


def test_the_next_epoch_finds_the_workers_of_the_last_one_and_of_one_that_was_left() -> None:
    before = live_actors()
    dataset = on_workers(Dataset.range(4).map(lambda x: os.getpid()))
    first = set(map(int, dataset))
    assert os.getpid() not in first
    assert set(map(int, dataset)) == first
    left = iter(dataset)
    next(left)
    left.close()
    assert set(map(int, dataset)) == first
    del dataset, left
    wait_until(lambda: live_actors() == before)


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
