"""The log as a state machine: every worker gets what came before a closure, in order, or what replaces it."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from raydist.coordinator.payload_log import StepPayloadLog


class Log(RuleBasedStateMachine):
    """Writes settings of some names; workers apply what they are sent, and start again now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.log = StepPayloadLog(2)
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
    log = StepPayloadLog(2)
    log.append(b"model")
    for number in range(100):
        log.append(str(number).encode(), frozenset({"lr"}))
        for worker in range(2):
            log.due(worker, log.end)
    assert log.num_held <= 4
    log.restarted(0)
    assert log.due(0, 1)[0] == b"model"
    assert log.due(1, log.end) == []
