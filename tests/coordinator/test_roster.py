"""Which workers may begin, and what happens to all where one does not fit."""

from __future__ import annotations

import logging
import time

import pytest

import raydist as rd
from raydist.actors.version_check import Software
from tests.coordinator.in_process import TIMEOUTS, ThreadPort, coordinated
from tests.coordinator.test_coordinator import scheduled

OLD = Software((("raydist", "0.0.9"),))


def test_a_worker_of_another_version_is_said_before_anything_runs() -> None:
    port = ThreadPort(2)
    port.software[1] = OLD
    said = rf"worker 1 has raydist 0\.0\.9, not {rd.__version__}\. Install the same"
    with coordinated(2, port=port) as (coordinator, _, side):
        with pytest.raises(rd.FailedPreconditionError, match=said):
            coordinator.value_of(scheduled(coordinator, lambda: 1))
        with pytest.raises(rd.FailedPreconditionError, match=said):
            scheduled(coordinator, lambda: 2)
        assert side.shared.begun == []


def test_a_worker_that_comes_back_with_another_version_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "raydist"), coordinated(2) as (coordinator, port, side):
        for _ in range(2):
            scheduled(coordinator, lambda: 1)
        coordinator.join()
        side.shared.begun.clear()
        port.software[1] = OLD
        port.kill(1)
        closures = [scheduled(coordinator, lambda n: n, n) for n in range(8)]
        coordinator.join()
        assert [coordinator.value_of(closure) for closure in closures] == list(range(8))
        _await(lambda: bool(caplog.messages))
    assert "The others go on without worker 1: All nodes must have the versions" in caplog.messages[0]


def test_workers_wait_for_one_that_says_nothing_and_then_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydist.coordinator.roster._TOGETHER_S", 0.5)
    port = ThreadPort(2)
    port.says_nothing.add(1)
    began = time.monotonic()
    with coordinated(2, port=port) as (coordinator, _, _side):
        assert coordinator.value_of(scheduled(coordinator, lambda: 7)) == 7
        assert 0.5 <= time.monotonic() - began < TIMEOUTS.start_s


def _await(condition: object) -> None:
    end = time.monotonic() + 10.0
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.01)
