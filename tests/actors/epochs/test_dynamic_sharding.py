"""Dynamic sharding as a state machine: readers claim, read and die. No batch is lost, and none is used twice.

With claims and links: `tests/strategies/test_parameter_server.py`.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from raydist.actors.epochs.dynamic_sharding import InputSplit, SplitAssignments
from raydist.actors.epochs.served_epoch import QueueEntry

WORKERS = st.integers(0, 2)


def batches_of(split: InputSplit) -> list[int]:
    return list(range(split.entry.number + split.begin, split.entry.end))


class Dealing(RuleBasedStateMachine):
    """Three workers that use their splits in order."""

    def __init__(self) -> None:
        super().__init__()
        self.splits = SplitAssignments()
        self.generations = [0, 0, 0]
        self.given: list[list[int]] = [[], [], []]  # since it was started
        self.used = [0, 0, 0]
        self.for_good: list[int] = []

    @rule(worker=WORKERS, size=st.integers(1, 4))
    def claim(self, worker: int, size: int) -> None:
        reader = worker, self.generations[worker]
        split = self.splits.assign_returned(reader)
        if split is None:
            place = self.splits.next_place
            split = self.splits.assign_next(reader, QueueEntry(place, ({},) * size))
        self.given[worker] += batches_of(split)

    @rule(worker=WORKERS, part=st.floats(0, 1))
    def use(self, worker: int, part: float) -> None:
        begin, end = self.used[worker], self.used[worker] + int(part * (len(self.given[worker]) - self.used[worker]))
        self.for_good += self.given[worker][begin:end]
        self.used[worker] = end

    @rule(worker=WORKERS)
    def confirm(self, worker: int) -> None:
        self.splits.confirm((worker, self.generations[worker]), self.used[worker])

    @rule(worker=WORKERS)
    def die(self, worker: int) -> None:
        self.splits.return_splits((worker, self.generations[worker]), self.used[worker])
        self.generations[worker] += 1
        self.given[worker], self.used[worker] = [], 0

    def teardown(self) -> None:
        for worker in range(3):
            self.die(worker)
        while (split := self.splits.assign_returned((0, 99))) is not None:
            self.for_good += batches_of(split)
        assert sorted(self.for_good) == list(range(self.splits.next_place))


Dealing.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestDealing = Dealing.TestCase


def test_what_comes_or_is_asked_for_by_a_reader_that_has_died_is_for_the_next() -> None:
    entry = QueueEntry(0, ({}, {}))
    for died_first in (True, False):
        splits = SplitAssignments()
        if died_first:
            splits.return_splits((0, 0), 0)
            splits.assign_next((0, 0), entry)
        else:
            splits.assign_next((0, 0), entry)
            splits.return_splits((0, 0), 0)
            assert splits.assign_returned((0, 0)) is None, "its request arrives late"
        again = splits.assign_returned((1, 0))
        assert again is not None
        assert batches_of(again) == [0, 1]
