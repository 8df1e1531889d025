"""Dynamic sharding as a state machine: readers claim, read and die. No batch is lost, and none is used twice."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from raydist.actors.epochs.dynamic_sharding import InputSplit, SplitAssignments, SplitServer
from raydist.actors.epochs.link import DynamicShardingLink
from raydist.actors.epochs.served_epoch import Poll, QueueEntry
from raydist.options import Timeouts

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


# --- claims of readers ------------------------------------------------------------------------------------------------


class Pass:
    """An epoch with entries of two places each, and the end after six places."""

    def __init__(self) -> None:
        self.polls: list[Poll] = []
        self.slow = False

    def poll(self, poll: Poll) -> tuple[QueueEntry, ...]:
        self.polls.append(poll)
        if self.slow:
            return ()
        return (QueueEntry(poll.start, ({},), last=True) if poll.start >= 6 else QueueEntry(poll.start, ({}, {})),)


def places(split: InputSplit | None) -> tuple[int, int] | None:
    return None if split is None else (split.entry.number + split.begin, split.entry.end)


def test_each_split_goes_to_one_reader_the_unused_rest_to_the_next_and_the_end_to_all() -> None:
    served: Any = Pass()
    split_server = SplitServer(served)
    served.slow = True
    assert split_server.claim((0, 0), 0) is None, "it asks again"
    served.slow = False
    assert [places(split_server.claim((0, 0), 0)) for _ in range(2)] == [(0, 2), (2, 4)]
    split_server.return_splits((0, 0), 1)
    assert [places(split_server.claim((1 + number % 2, 0), 0)) for number in range(3)] == [(1, 2), (2, 4), (4, 6)]
    for worker in (1, 2):
        split = split_server.claim((worker, 0), 0)
        assert split is not None
        assert split.entry.last


# --- the link of one worker -------------------------------------------------------------------------------------------


class Link:
    """A link that answers claims with the given splits."""

    def __init__(self, *splits: InputSplit | None) -> None:
        self.splits = list(splits)
        self.claims: list[Any] = []
        self.timeouts, self.on_host = Timeouts(), False

    def claim(self, reader: Any, used: int) -> Any:
        self.claims.append((reader, used))
        return self.splits.pop(0)

    def receive_split(self, asked: Any) -> Any:
        return asked


def test_places_are_numbered_as_they_come_to_this_worker() -> None:
    inner: Any = Link(
        InputSplit(QueueEntry(10, ({}, {}, {})), begin=1),
        None,
        InputSplit(QueueEntry(40, ({},))),
        InputSplit(QueueEntry(41, ({},), last=True)),
    )
    link = DynamicShardingLink(inner, (3, 1))
    poll = Poll(0, start=0, done=0, wait_s=1.0)
    found = []
    for _ in range(4):
        link.used += 1
        found.append([(entry.number, entry.end, entry.last) for entry in link.receive(link.ask(poll))])
    assert found == [[(-1, 2, False)], [], [(2, 3, False)], [(3, 4, True)]]
    assert inner.claims == [((3, 1), used) for used in (1, 2, 3, 4)]
    assert link.call("position_of", 0).number == 3
