from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from raydist.parameter_servers.serving.clocks import Clocks

WORKERS = st.integers(0, 3)


class BoundedWorkers(RuleBasedStateMachine):
    """Workers that begin closures when they may, come and go; what each has seen of the others is counted here."""

    @initialize(bound=st.integers(0, 2))
    def start(self, bound: int) -> None:
        self.bound = bound
        self.clocks = Clocks(bound)
        self.here: list[int] = []  # in the order in which they came
        self.ahead: dict[tuple[int, int], int] = {}  # closures that one has begun more than another since both are here

    @rule(worker=WORKERS)
    def begin(self, worker: int) -> None:
        if worker in self.here and not self.clocks.may_read(worker):
            return  # it still waits
        if worker in self.here:
            for other in self.here:
                self.ahead[worker, other] += 1
                self.ahead[other, worker] -= 1
        else:
            self.here.append(worker)
            for other in self.here:
                self.ahead[worker, other] = self.ahead[other, worker] = 0
        self.clocks.begin(worker)

    @rule(worker=WORKERS)
    def end(self, worker: int) -> None:
        """Ends, or dies: also while it waits."""
        self.clocks.end(worker)
        self.here = [each for each in self.here if each != worker]

    @invariant()
    def the_slowest_never_waits(self) -> None:
        if getattr(self, "here", []):
            assert any(self.clocks.may_read(worker) for worker in self.here)

    @invariant()
    def who_reads_is_not_too_far_ahead(self) -> None:
        """Of who came later; of others too, but for what they were ahead already."""
        here: list[int] = getattr(self, "here", [])
        for place, reader in enumerate(here):
            if self.clocks.may_read(reader):
                assert all(self.ahead[reader, other] <= self.bound for other in here[place + 1 :])
                assert all(self.ahead[reader, other] <= 2 * self.bound + 1 for other in here[:place])


TestBoundedWorkers: Any = BoundedWorkers.TestCase


def test_who_comes_late_holds_nobody_up_and_is_held_up_by_nobody() -> None:
    clocks = Clocks(2)
    for _ in range(100):
        clocks.begin(0)
    assert clocks.may_read(0)  # alone
    clocks.begin(1)
    for _ in range(2):
        clocks.begin(0)
        assert clocks.may_read(0)
    clocks.begin(0)
    assert not clocks.may_read(0)
    clocks.begin(1)
    assert clocks.may_read(0)
    clocks.begin(0)
    assert not clocks.may_read(0)
    clocks.end(1)
    assert clocks.may_read(0)


def test_who_was_away_does_not_come_back_with_an_old_clock() -> None:
    clocks = Clocks(1)
    clocks.begin(1)
    clocks.end(1)
    for _ in range(50):
        clocks.begin(0)
    clocks.end(0)
    clocks.begin(1)  # all were away
    clocks.begin(0)
    assert clocks.may_read(0)
