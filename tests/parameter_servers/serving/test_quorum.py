from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from raydist.parameter_servers.serving.sync_steps import Accepted, Quorum

WORKERS = st.integers(0, 3)


class StepsWithBackups(RuleBasedStateMachine):
    """Workers that hold closures, arrive, end and die in any order."""

    @initialize(backups=st.integers(0, 3))
    def start(self, backups: int) -> None:
        self.backups = backups
        self.quorum = Quorum(backups)
        self.holding: set[int] = set()
        self.waiting: set[int] = set()
        self.steps: dict[int, set[int]] = {}
        self.last: dict[int, int] = {}

    @rule(worker=WORKERS)
    def begin(self, worker: int) -> None:
        if worker not in self.waiting:
            self.quorum.begin(worker)
            self.holding.add(worker)

    @rule(worker=WORKERS, behind=st.integers(0, 2))
    def arrive(self, worker: int, behind: int) -> None:
        if worker not in self.holding or worker in self.waiting:
            return
        step = max(0, self.quorum.step - behind)
        late = step < self.quorum.step and self.last.get(worker) != step
        told = self.quorum.arrive(worker, step)
        assert (told == "late") == late
        if told == "waiting" or (told == "accepted" and step not in self.steps):
            self.waiting.add(worker)
        self.look()

    @rule(worker=WORKERS)
    def end(self, worker: int) -> None:
        if worker not in self.waiting:
            self.quorum.end(worker)
            self.holding.discard(worker)
            self.look()

    @rule(worker=WORKERS)
    def die(self, worker: int) -> None:
        self.quorum.forget(worker)
        self.holding.discard(worker)
        self.waiting.discard(worker)
        self.last.pop(worker, None)
        self.look()

    @rule()
    def finish(self) -> None:
        decided = self.quorum.decide()
        assert (decided is None) == (not self.waiting)
        self.look()

    def look(self) -> None:
        """Who has waited and is accepted now made up one step together."""
        told = {worker: self.quorum.accepted(worker) for worker in self.waiting}
        fresh = {worker: each for worker, each in told.items() if each is not None and each.step not in self.steps}
        if fresh:
            [accepted] = set(fresh.values())
            assert accepted.completes == len(fresh)
            self.steps[accepted.step] = set(fresh)
            self.last |= dict.fromkeys(fresh, accepted.step)
            self.waiting -= set(fresh)

    @invariant()
    def nobody_waits_for_those_who_do_not_come(self) -> None:
        waiting: set[int] = getattr(self, "waiting", set())
        if waiting:
            assert len(waiting) < max(1, len(self.holding) - self.backups)

    @invariant()
    def steps_follow_one_another(self) -> None:
        assert sorted(getattr(self, "steps", {})) == list(range(len(getattr(self, "steps", {}))))


TestStepsWithBackups: Any = StepsWithBackups.TestCase


def test_a_step_that_waits_is_decided_when_others_end() -> None:
    quorum = Quorum(0)
    for worker in range(3):
        quorum.begin(worker)
    assert quorum.arrive(0, 0) == "waiting"
    quorum.end(1)
    assert quorum.accepted(0) is None
    quorum.forget(2)
    assert quorum.accepted(0) == Accepted(step=0, completes=1)
    assert quorum.arrive(0, 0) == "accepted"  # told twice


def test_who_died_is_no_part_of_what_is_not_decided() -> None:
    quorum = Quorum(0)
    for worker in range(3):
        quorum.begin(worker)
    quorum.arrive(0, 0)
    quorum.arrive(1, 0)
    quorum.forget(0)
    assert quorum.arrive(2, 0) == "accepted"
    assert quorum.accepted(1) == Accepted(step=0, completes=2)
    assert quorum.accepted(0) is None
