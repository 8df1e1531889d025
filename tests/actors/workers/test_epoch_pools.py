"""The number of workers for AUTOTUNE, pools that are reused by the next epoch, and the start of workers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from raydist.actors.workers import epoch_pools
from raydist.actors.workers.crash_bisection import RowsDone, RunRows, Streak, isolate
from raydist.actors.workers.epoch_pools import EpochPools, choose_num_workers
from raydist.actors.workers.handle import FailedStarts, WorkerKind
from raydist.actors.workers.pool import RunningWorkers
from raydist.cluster import placement
from raydist.cluster.placement import Outlook
from raydist.core.errors import FailedPreconditionError, UnavailableError
from raydist.dataset import Dataset
from raydist.options import Timeouts
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, StageResult
from raydist.pipelines.engine.kernel import run_stage
from tests.pipelines.engine.toy_stages import SOURCE, block_of, spec_of


def double(x: Any) -> Any:
    return x * 2


LIGHT = Dataset.range(10).shuffle(10).batch(2)
HEAVY = Dataset.range(10).map(double).shuffle(10).batch(2)
ORDERED = Dataset.range(10).map(double, num_parallel_calls=1).batch(2)


def test_autotune_takes_spare_cores_for_user_functions() -> None:
    for dataset, cores, replicas, nodes, workers in [
        (LIGHT, 64, 1, 1, 0),
        (ORDERED, 64, 1, 1, 0),
        (HEAVY, 2, 2, 1, 0),
        (HEAVY, 4, 2, 1, 0),
        (HEAVY, 8, 4, 1, 3),
        (HEAVY, 64, 4, 1, 8),
        (HEAVY, 8, 4, 2, 11),  # the spare cores of all nodes
        (HEAVY, 64, 4, 2, 16),
    ]:
        chosen = choose_num_workers([dataset._op], num_cores=cores, num_replicas=replicas, num_nodes=nodes)
        assert chosen == workers, (dataset, cores, replicas, nodes)


def test_workers_with_resources_of_their_own_need_no_core_here() -> None:
    chosen = [
        choose_num_workers([op], num_cores=cores, num_replicas=2, are_elsewhere=True)
        for op in (HEAVY._op, LIGHT._op)
        for cores in (2, 8)
    ]
    assert chosen == [1, 5, 0, 0]


class FakePool:
    """A pool that is idle or not, as the test sets it."""

    def __init__(self, num_workers: int, **kwargs: Any) -> None:
        self.num_workers = num_workers
        self.idle = True
        self.closed = False

    def serves(self, num_workers: int, resources: Any, timeouts: Any, memory_bytes: Any, node_ids: Any) -> bool:
        return num_workers == self.num_workers

    def is_idle(self, patience_s: float) -> bool:
        return self.idle

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[EpochPools]:
    monkeypatch.setattr(epoch_pools, "ActorExecutor", FakePool)
    pools = EpochPools()
    yield pools
    pools.clear()


def borrow(pools: EpochPools, num_workers: int) -> Any:
    return pools.borrow(num_workers, name="x", resources={}, timeouts=Timeouts())


def test_the_pool_given_back_last_serves_the_next_pass_and_all_others_are_closed(pools: EpochPools) -> None:
    busy, first, second = (borrow(pools, 2) for _ in range(3))
    busy.idle = False
    for pool in (busy, first, second):
        pools.give_back(pool, patience_s=0.0)
    assert [pool.closed for pool in (busy, first, second)] == [True, False, True]
    assert borrow(pools, 2) is first
    assert borrow(pools, 2) is not first
    pools.give_back(first, patience_s=0.0)
    other = borrow(pools, 3)
    assert (other.num_workers, first.closed) == (3, True), "another kind of pool replaces it"
    pools.give_back(other, patience_s=0)
    pools.clear()
    pools.clear()
    assert other.closed
    assert borrow(pools, 3) is not other


# --- running workers --------------------------------------------------------------------------------------------------


class Worker:
    """Runs from a time on."""

    def __init__(self, after_s: float = 0.0) -> None:
        self._from = time.monotonic() + after_s

    @property
    def runs(self) -> bool:
        return time.monotonic() >= self._from


def running(resources: dict[str, float], start_s: float = 20.0) -> Any:
    return RunningWorkers("pool", WorkerKind(resources, start_s=start_s))


def test_blocks_go_to_workers_that_run_and_the_first_one_is_enough() -> None:
    workers: Any = [Worker(60), Worker(), Worker(), Worker(60)]
    assert running({}).place_of_next(workers, [0, 2, 1, 0]) == 2
    assert running({}).place_of_next(workers[:1], [5]) == 0  # there is no other
    watched = running({"CPU": 1.0})
    later: Any = [Worker(60), Worker(0.2)]
    watched.await_first(lambda: later, lambda: False)
    assert later[1].runs
    watched.await_first(lambda: pytest.fail("asked again"), lambda: False)


def test_workers_that_no_node_can_hold_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    node = {"NodeID": "a", "NodeManagerAddress": "10.0.0.1", "Alive": True, "Resources": {"CPU": 4.0}}
    monkeypatch.setattr("ray.nodes", lambda: [node])
    monkeypatch.setattr(placement, "_SETTLE_S", 0.1)
    monkeypatch.setattr(placement, "look", lambda: Outlook(grows=False))
    workers: Any = [Worker(60)]
    with pytest.raises(FailedPreconditionError, match=r"can never hold 1 input workers. Asked: 1 x {'CPU': 8.0}"):
        running({"CPU": 8.0}).await_first(lambda: workers, lambda: False)


def test_a_pool_that_stays_small_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    watched = running({"CPU": 1.0}, start_s=0.1)
    workers: Any = [Worker(), Worker(60)]
    with caplog.at_level(logging.WARNING, "raydist"):
        watched.place_of_next(workers, [0, 0])
        assert not caplog.records
        time.sleep(0.15)
        watched.place_of_next(workers, [0, 0])
        watched.place_of_next(workers, [0, 0])
    (record,) = caplog.records
    assert "1 of 2 input workers of pool have not started within 0.1 s" in record.getMessage()


# --- elements that kill workers ---------------------------------------------------------------------------------------

SPEC = spec_of(SOURCE.map(lambda x: x * 10))
BLOCK = block_of(SOURCE)


def workers(deadly: Sequence[int], accidents: Sequence[int] = (), reason: str = "os._exit(3)") -> RunRows:
    """Workers that die on the rows `deadly`, with this exit reason, and without any on each of the rows `accidents`."""
    pending = list(accidents)

    def run_rows(first: int) -> RowsDone:
        results: list[StageResult] = []
        for row in range(first, BLOCK.num_rows):
            if row in deadly:
                return RowsDone(results, "worker-9", reason)
            if row in pending:
                pending.remove(row)
                break
            results.append(run_stage(SPEC, BLOCK.slice(row, row + 1), (100 + row,)))
        return RowsDone(results, "worker-9")

    return run_rows


def shape_of(result: StageResult) -> list[object]:
    return [item.rows() if isinstance(item, Block) else (item.index, str(item.error)[:49]) for item in result.items]


def message_of(result: StageResult, place: int) -> str:
    error = result.items[place]
    assert isinstance(error, ElementError)
    return str(error.error)


def test_an_element_that_kills_workers_is_an_error_in_its_place_and_kills_from_outside_condemn_nobody() -> None:
    result = isolate(SPEC, BLOCK, (100,), workers(deadly=[1, 4]), Streak())
    message = "A function must not end its process: map-1 (test_"
    assert shape_of(result) == [[0], (101, message), [20], [30], (104, message), [50]]
    assert result.inputs == (6,)
    assert "worker-9 on element 101 of its input, 2 times (os._exit(3))" in message_of(result, 1)
    silent = isolate(SPEC, BLOCK, (100,), workers(deadly=[2], reason=""), Streak())
    assert "on element 102 of its input, 6 times. It may" in message_of(silent, 2)
    innocent = isolate(SPEC, BLOCK, (100,), workers(deadly=[], accidents=[0, 0, *[3] * 5, 5]), Streak())
    assert shape_of(innocent) == [[0], [10], [20], [30], [40], [50]]


def test_many_condemned_elements_in_a_row_are_not_the_elements_fault() -> None:
    streak = Streak()
    assert len(isolate(SPEC, BLOCK, (100,), workers(deadly=[0, 2, 4, 5]), streak).items) == 6
    assert streak.length == 2, "the element before them did not fail"
    with pytest.raises(UnavailableError, match=r"on element 100 .*So did the 2 elements before it"):
        isolate(SPEC, BLOCK, (100,), workers(deadly=[0]), streak)
    streak.end()
    assert len(isolate(SPEC, BLOCK, (100,), workers(deadly=[0]), streak).items) == 6


# --- workers that die while they start --------------------------------------------------------------------------------


def test_what_raises_by_itself_is_not_tried_so_often() -> None:
    starts = FailedStarts()
    error = RuntimeError("The actor died because of an error raised in its creation task.")
    for _ in range(2):
        starts.add("worker", error)
    with pytest.raises(UnavailableError, match="as were the 2 before it"):
        starts.add("worker", error)
