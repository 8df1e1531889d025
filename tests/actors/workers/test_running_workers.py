from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from raydist.actors.workers.handle import WorkerKind
from raydist.actors.workers.pool import RunningWorkers
from raydist.cluster import placement
from raydist.cluster.placement import Outlook
from raydist.core.errors import FailedPreconditionError


class Worker:
    """Runs from a time on."""

    def __init__(self, after_s: float = 0.0) -> None:
        self._from = time.monotonic() + after_s

    @property
    def runs(self) -> bool:
        return time.monotonic() >= self._from


def running(resources: dict[str, float], start_s: float = 20.0) -> Any:
    return RunningWorkers("pool", WorkerKind(resources, start_s=start_s))


def test_blocks_go_to_workers_that_run() -> None:
    workers: Any = [Worker(60), Worker(), Worker(), Worker(60)]
    assert running({}).place_of_next(workers, [0, 2, 1, 0]) == 2
    assert running({}).place_of_next(workers[:1], [5]) == 0  # there is no other


def test_workers_that_need_no_resources_are_not_waited_for() -> None:
    running({}).await_first(lambda: pytest.fail("started"), lambda: False)


def test_the_first_worker_that_runs_is_enough() -> None:
    watched = running({"CPU": 1.0})
    workers: Any = [Worker(60), Worker(0.2)]
    watched.await_first(lambda: workers, lambda: False)
    assert workers[1].runs
    watched.await_first(lambda: pytest.fail("asked again"), lambda: False)


def test_a_closed_pool_is_not_waited_for() -> None:
    workers: Any = [Worker(60)]
    running({"CPU": 1.0}).await_first(lambda: workers, lambda: True)


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
