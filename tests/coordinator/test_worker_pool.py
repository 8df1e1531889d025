"""The states of workers, and the log that each of them follows."""

from __future__ import annotations

import logging
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import raydist as rd
from raydist.actors.version_check import Software
from raydist.coordinator.worker_pool import PayloadLog
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
    monkeypatch.setattr("raydist.coordinator.worker_pool._TOGETHER_S", 0.5)
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


class Log(RuleBasedStateMachine):
    """Writes settings of some names; workers apply what they are sent, and start again now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.log = PayloadLog(2)
        self.written: list[dict[str, int]] = []
        self.workers: list[dict[str, int]] = [{}, {}]

    @rule(names=st.frozensets(st.sampled_from("abc"), min_size=1), repeats=st.booleans())
    def write(self, names: frozenset[str], repeats: bool) -> None:
        number = self.log.end
        entry = ",".join(f"{name}={number}" for name in sorted(names))
        self.log.append(entry.encode(), names if repeats else frozenset())
        self.written.append({**(self.written[-1] if self.written else {}), **dict.fromkeys(names, number)})

    @rule(worker=st.integers(0, 1), back=st.integers(0, 3))
    def send(self, worker: int, back: int) -> None:
        before = max(0, self.log.end - back)
        for entry in self.log.due(worker, before):
            pairs = (pair.split("=") for pair in entry.decode().split(","))
            self.workers[worker].update({name: int(number) for name, number in pairs})
        expected = self.written[before - 1] if before else {}
        found = self.workers[worker]
        assert all(found.get(name, -1) >= number for name, number in expected.items())

    @rule(worker=st.integers(0, 1))
    def restart(self, worker: int) -> None:
        self.workers[worker] = {}
        self.log.restarted(worker)

    @invariant()
    def is_in_order(self) -> None:
        assert self.log.num_held <= self.log.end


Log.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestLog = Log.TestCase


def test_a_learning_rate_that_is_set_for_every_step_leaves_a_short_log() -> None:
    log = PayloadLog(2)
    log.append(b"model")
    for number in range(100):
        log.append(str(number).encode(), frozenset({"lr"}))
        for worker in range(2):
            log.due(worker, log.end)
    assert log.num_held <= 4
    log.restarted(0)
    assert log.due(0, 1)[0] == b"model"
    assert log.due(1, log.end) == []
