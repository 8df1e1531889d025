"""The pool of input workers on a local Ray."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from raydist.actors.workers.epoch_pools import SharedExecutor
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
from raydist.pipelines.elements.convert import numpy_rows
from raydist.pipelines.run.iterator import DatasetIterator

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture
def pool() -> Iterator[ActorExecutor]:
    pool = ActorExecutor(2, name="test", timeouts=Timeouts(element_s=20.0))
    yield pool
    pool.close()


def iterate(dataset: Dataset, pool: ActorExecutor) -> DatasetIterator[Any]:
    """An iterator that leaves the pool open when it ends."""
    return DatasetIterator(
        dataset._op,
        options=dataset.options(),
        seed=5,
        epoch=0,
        convert=numpy_rows,
        make_executor=lambda options: SharedExecutor(pool),
    )


def pid_of(pool: ActorExecutor, index: int = 0) -> int:
    actor: Any = ray.get_actor(pool.worker_names[index])
    pid: int = ray.get(actor.hello.remote())
    return pid


def test_any_number_of_workers_gives_the_same_elements() -> None:
    def noisy(x: Any, *, rng: np.random.Generator) -> Any:
        return {"x": x, "noise": rng.integers(1000), "name": str(int(x)).encode()}

    dataset = Dataset.range(300).shuffle(50, seed=1).map(noisy).filter(lambda e: e["x"] % 3 > 0).batch(7)
    found = []
    for num_workers in (0, 1, 3):
        options = Options(seed=2, num_input_workers=num_workers)
        rows = dataset.with_options(options).as_numpy_iterator()
        found.append([{key: value.tolist() for key, value in row.items()} for row in rows])
    assert found[0] == found[1] == found[2]
    assert sum(len(row["x"]) for row in found[0]) == 200


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


def test_a_value_that_cannot_be_an_element_is_named(pool: ActorExecutor) -> None:
    with pytest.raises(RaydistError, match="lock"):
        next(iterate(Dataset.range(2).map(lambda x: threading.Lock()), pool))


def test_a_function_that_cannot_be_pickled_is_named(pool: ActorExecutor) -> None:
    lock = threading.Lock()

    def guarded(x: Any) -> Any:
        with lock:
            return x

    with pytest.raises(InvalidArgumentError, match=r"guarded.*lock.*num_input_workers=0"):
        next(iterate(Dataset.range(2).map(guarded), pool))


def test_a_killed_worker_is_replaced_and_nothing_is_lost(pool: ActorExecutor) -> None:
    def slow(x: Any) -> Any:
        time.sleep(0.001)
        return x

    iterator = iterate(Dataset.range(1500).map(slow), pool)
    next(iterator)
    first, second = pool.worker_names
    os.kill(pid_of(pool, 0), signal.SIGKILL)
    assert [int(x) for x in iterator] == list(range(1, 1500))
    assert first not in pool.worker_names
    assert second in pool.worker_names


def test_large_results_lie_in_the_object_store_and_users_get_their_own() -> None:
    dataset = Dataset.range(200).map(lambda x: np.full((250, 1000), x, np.float32)).batch(8)
    pool = ActorExecutor(2, name="shared")
    try:
        for batch in iterate(dataset, pool):
            batch += 1  # it is the user's own
        held = list(iterate(dataset, pool))
        assert [batch[:, 249, 999].tolist() for batch in held] == [list(range(k, k + 8)) for k in range(0, 200, 8)]
    finally:
        pool.close()
    assert held[0][0, 0, 0] == 0, "what is held outlives the pool"


def test_a_stage_reads_what_another_one_stored(pool: ActorExecutor) -> None:
    def keep(row: Any) -> Any:
        seen.append(row)  # in the worker: a user may keep what it is given
        row += 1
        return row

    seen: list[np.ndarray[Any, Any]] = []
    large = Dataset.range(64).map(lambda x: np.full(5_000, x, np.float32))
    dataset = large.shuffle(16, seed=3).batch(8).map(keep).unbatch().map(lambda row: row * 2)
    expected = [float(row[0]) for row in dataset.as_numpy_iterator()]
    assert sorted(expected) == [2.0 * (x + 1) for x in range(64)]
    assert [float(row[4_999]) for row in iterate(dataset.with_options(Options(seed=5)), pool)] == [
        float(row[0]) for row in dataset.with_options(Options(seed=5)).as_numpy_iterator()
    ]


def test_what_was_read_is_let_go(pool: ActorExecutor) -> None:
    dataset = Dataset.range(256).map(lambda x: np.full(250_000, x, np.float32)).shuffle(4, seed=1).batch(4)
    held = []
    for _ in iterate(dataset, pool):
        columns = (each for each in gc.get_objects() if type(each) is ResultColumn)
        held.append(sum(column.row_bytes * column.shape[0] for column in columns))
    assert max(held) > 0
    assert max(held) < 128 << 20, "256 MB passed through"


def test_a_worker_that_is_killed_takes_no_result_with_it() -> None:
    def slow(x: Any) -> Any:
        time.sleep(0.005)
        return np.full((50, 1000), x, np.float32)

    pool = ActorExecutor(2, name="shared")
    try:
        iterator = iterate(Dataset.range(160).map(slow).batch(4), pool)
        first = next(iterator)
        os.kill(pid_of(pool, 0), signal.SIGKILL)
        rest = list(iterator)
        assert [int(batch[k, 0, 0]) for batch in (first, *rest) for k in range(4)] == list(range(160))
    finally:
        pool.close()


def test_a_worker_that_is_killed_while_it_starts_is_replaced() -> None:
    pool = ActorExecutor(2, name="test", timeouts=Timeouts(start_s=20.0))
    pool.start()
    before = pool.worker_names
    for name in before:
        ray.kill(ray.get_actor(name))
    try:
        assert [int(x) for x in iterate(Dataset.range(40).map(abs), pool)] == list(range(40))
        assert not set(before) & set(pool.worker_names)
    finally:
        pool.close()


def test_workers_that_cannot_start_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    start = WorkerKind.start

    def start_and_die(kind: WorkerKind, name: str, number: int = 0) -> Any:
        actor = start(kind, name)
        ray.kill(actor)
        return actor

    monkeypatch.setattr(WorkerKind, "start", start_and_die)
    pool = ActorExecutor(1, name="test", timeouts=Timeouts(start_s=20.0))
    try:
        with pytest.raises(UnavailableError, match=r"test-.*-worker-19 is gone while starting, as were the 19 before"):
            next(iterate(Dataset.range(1).map(abs), pool))
    finally:
        pool.close()


def test_kills_from_outside_are_not_blamed_on_the_function(pool: ActorExecutor, tmp_path: Path) -> None:
    def slow(x: Any) -> Any:
        if x == 3:
            with (tmp_path / "tries").open("a") as tries:
                tries.write(f"{os.getpid()}\n")
            time.sleep(1.0)
        return x

    def kill_three() -> None:
        killed: set[str] = set()
        while len(killed) < 3:
            time.sleep(0.02)
            tries = (tmp_path / "tries").read_text().split() if (tmp_path / "tries").exists() else []
            for pid in set(tries) - killed:
                os.kill(int(pid), signal.SIGKILL)
                killed.add(pid)

    killer = threading.Thread(target=kill_three)
    killer.start()
    assert [int(x) for x in iterate(Dataset.range(6).map(slow), pool)] == list(range(6))
    killer.join()
    assert len((tmp_path / "tries").read_text().split()) == 4


def test_many_threads_share_a_pool(pool: ActorExecutor) -> None:
    dataset = Dataset.zip(*(Dataset.range(150).map(lambda x, k=k: x + k).prefetch(3) for k in range(4)))
    rows = [tuple(map(int, row)) for row in iterate(dataset, pool)]
    assert rows == [(x, x + 1, x + 2, x + 3) for x in range(150)]
    assert len(pool.worker_names) == 2


def test_a_stuck_function_reaches_the_limit() -> None:
    pool = ActorExecutor(1, name="test", timeouts=Timeouts(element_s=0.5))
    try:
        iterator = iterate(Dataset.range(3).map(lambda x: time.sleep(60)), pool)
        message = r"test.*worker-0.*Timeouts\.element_s.*map-1 \(test_pool\.py:.*stuck at element 0.*was killed"
        with pytest.raises(DeadlineExceededError, match=message):
            next(iterator)
    finally:
        pool.close()


def test_closing_gives_up_what_is_waited_for(pool: ActorExecutor) -> None:
    iterator = iterate(Dataset.range(1).map(lambda x: time.sleep(60)), pool)
    timer = threading.Timer(1.5, pool.close)
    timer.start()
    with pytest.raises(CancelledError, match="closed"):
        next(iterator)
    timer.join()
    with pytest.raises(CancelledError, match="closed"):
        next(iterate(Dataset.range(1).map(lambda x: x), pool))


def test_workers_that_do_not_fit_say_what_they_asked_for() -> None:
    pool = ActorExecutor(1, timeouts=Timeouts(start_s=1.0), resources={"unheard_of": 1})
    try:
        with pytest.raises(DeadlineExceededError, match="unheard_of"):
            next(iterate(Dataset.range(1).map(lambda x: x), pool))
    finally:
        pool.close()


def test_a_pool_is_idle_only_between_its_blocks(pool: ActorExecutor) -> None:
    assert [int(x) for x in iterate(Dataset.range(5).map(lambda x: x), pool)] == [0, 1, 2, 3, 4]
    assert pool.is_idle(5.0)
    assert [worker.under_way for worker in pool._workers] == [(), ()], "the object store would keep what it has made"
    assert pool.serves(2, {}, Timeouts(element_s=20.0))
    assert not pool.serves(3, {}, Timeouts(element_s=20.0))
    pool.close()
    assert not pool.is_idle(0.0)


def test_a_slow_block_holds_back_no_other_where_any_order_will_do(pool: ActorExecutor) -> None:
    def slow_first(x: Any) -> Any:
        time.sleep(1.5 if x == 0 else 0.001)
        return x

    dataset = Dataset.range(200).map(slow_first, deterministic=False)
    first = iterate(dataset, pool)
    begun = [int(next(first)) for _ in range(50)]
    assert begun[0] != 0
    resumed = iterate(dataset, pool)
    resumed.load_state_dict(first.state_dict())
    first.close()
    assert sorted(begun + [int(x) for x in resumed]) == list(range(200))


def test_the_next_iteration_knows_how_large_blocks_should_be(pool: ActorExecutor) -> None:
    dataset = Dataset.range(3_000).map(lambda x: x + 1).batch(10)
    assert len(list(iterate(dataset, pool))) == 300
    (size,) = pool._sizes.values()
    assert size.rows(10, 4, 1) > 64
    assert len(list(iterate(dataset, pool))) == 300
    assert list(pool._sizes.values()) == [size]
