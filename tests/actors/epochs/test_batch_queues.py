"""The rules of the queues, driven by events: every replica sees every entry once and in order, within the credits."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from raydist.actors.epochs.batch_group import BatchGroup
from raydist.actors.epochs.batch_queues import BatchQueues, Position, QueueEntry
from raydist.actors.portable_errors import pack_error
from raydist.core.errors import CancelledError, FailedPreconditionError
from raydist.core.nest import LEAF

NUM_REPLICAS = 3


def steps(number: int, count: int, replicas: int = NUM_REPLICAS) -> QueueEntry:
    """A group of `count` steps."""
    refs = tuple(f"{number}/{rank}" for rank in range(replicas))
    group = BatchGroup(number, refs, ((1,) * replicas,) * count, LEAF)
    return QueueEntry(number, tuple({"after": number + place + 1} for place in range(count)), group=group)


def step(number: int, replicas: int = NUM_REPLICAS) -> QueueEntry:
    return steps(number, 1, replicas)


class QueueMachine(RuleBasedStateMachine):
    """Replicas read at their own pace, lose answers, stop and go on; groups are of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.queues = BatchQueues(num_replicas=NUM_REPLICAS, start={"after": 0})
        self.produced = 0
        self.used = [0] * NUM_REPLICAS
        self.ended = False

        self.groups: list[tuple[int, int]] = []

    @precondition(lambda self: not self.queues.finished)
    @rule(count=st.integers(1, 4))
    def produce(self, count: int) -> None:
        self.queues.offer(steps(self.produced, count), num_bytes=10 * count)
        self.groups.append((self.produced, self.produced + count))
        self.produced += count

    @precondition(lambda self: not self.queues.finished)
    @rule()
    def fail(self) -> None:
        error = pack_error(ValueError("here"))
        self.queues.offer(QueueEntry(self.produced, ({"after": self.produced + 1},), error=error))
        self.groups.append((self.produced, self.produced + 1))
        self.produced += 1

    @precondition(lambda self: not self.queues.finished)
    @rule()
    def end(self) -> None:
        self.queues.offer(QueueEntry(self.produced, ({"after": self.produced},), last=True))
        self.ended = True

    @rule(rank=st.integers(0, NUM_REPLICAS - 1), ahead=st.integers(0, 4))
    def take(self, rank: int, ahead: int) -> None:
        start = self.used[rank] + ahead
        expected = start
        for entry in self.queues.take(rank, start):
            assert entry.number <= expected < entry.end, "it goes on where it stopped, maybe within a group"
            expected = entry.end
            if entry.group is not None:
                assert entry.group.refs[rank] == f"{entry.number}/{rank}"
                assert [ref for ref in entry.group.refs if ref is not None] == [entry.group.refs[rank]]
        assert expected == max(start, self.produced + self.ended)

    @rule(rank=st.integers(0, NUM_REPLICAS - 1), count=st.integers(0, 3))
    def use(self, rank: int, count: int) -> None:
        self.used[rank] = min(self.used[rank] + count, self.produced)
        self.queues.acknowledge(rank, self.used[rank])

    @rule()
    def reclaim(self) -> None:
        furthest = max(self.used)
        position = self.queues.reclaim()
        assert position.number == furthest
        assert position.state == {"after": furthest}
        self.used = [furthest] * NUM_REPLICAS

    @invariant()
    def what_is_not_used_can_be_taken(self) -> None:
        for rank, used in enumerate(self.used):
            numbers = [n for entry in self.queues.take(rank, used) for n in range(entry.number, entry.end)]
            assert [n for n in numbers if n >= used] == list(range(used, self.produced + self.ended))

    @invariant()
    def positions_have_the_state_before_them(self) -> None:
        for rank, used in enumerate(self.used):
            assert self.queues.position_of(rank) == Position(used, {"after": used})

    @invariant()
    def a_group_is_held_until_its_last_step_is_done_with(self) -> None:
        done = min(self.used)
        held = [(start, stop) for start, stop in self.groups if stop > done]
        assert self.queues.num_kept == (self.produced - held[0][0] if held else 0) + self.ended
        assert self.queues.num_ahead == self.produced - done + self.ended


TestQueues = QueueMachine.TestCase


def test_the_driver_reads_for_all() -> None:
    queues = BatchQueues(num_replicas=2, start={})
    queues.offer(step(0, 2), 10)
    queues.offer(steps(1, 2, 2), 20)
    assert (queues.num_ahead, queues.num_bytes) == (3, 30)
    first, _ = queues.take(None, 0)
    assert first.group is not None
    assert first.group.refs == ("0/0", "0/1")
    queues.acknowledge(None, 1)
    assert (queues.num_ahead, queues.num_kept, queues.num_bytes) == (2, 2, 20)
    queues.acknowledge(None, 2)
    assert (queues.num_ahead, queues.num_kept, queues.num_bytes) == (1, 2, 20), "half of a group holds all of it"


def test_reading_can_go_on_within_a_group() -> None:
    queues = BatchQueues(num_replicas=2, start={"after": 0})
    queues.offer(steps(0, 4, 2))
    queues.offer(steps(4, 2, 2))
    queues.acknowledge(0, 3)
    queues.acknowledge(1, 1)
    assert queues.reclaim() == Position(3, {"after": 3})
    assert [(entry.number, entry.end) for entry in queues.take(None, 3)] == [(0, 4), (4, 6)]
    assert queues.position_of(1) == Position(3, {"after": 3})


def test_old_acknowledgements_change_nothing() -> None:
    queues = BatchQueues(num_replicas=1, start={})
    for number in range(3):
        queues.offer(step(number, 1))
    queues.acknowledge(0, 2)
    queues.acknowledge(0, 1)
    assert queues.position_of(0) == Position(2, {"after": 2})
    queues.acknowledge(0, 3)
    assert queues.position_of(0) == Position(3, {"after": 3})


def test_an_entry_that_all_are_done_with_cannot_be_read_again() -> None:
    queues = BatchQueues(num_replicas=1, start={})
    queues.offer(step(0, 1))
    queues.acknowledge(0, 1)
    with pytest.raises(FailedPreconditionError, match="Batch 0"):
        queues.take(0, 0)


def test_nothing_follows_the_end() -> None:
    queues = BatchQueues(num_replicas=1, start={})
    queues.offer(QueueEntry(0, ({},), last=True))
    assert queues.finished
    queues.acknowledge(0, 1)
    assert [entry.last for entry in queues.take(0, 0)] == [True]
    with pytest.raises(FailedPreconditionError, match="raydist bug"):
        queues.offer(step(1, 1))


def test_close_wakes_readers_and_drops_everything() -> None:
    queues = BatchQueues(num_replicas=1, start={})
    queues.offer(step(0, 1))
    assert not queues.ready(1)
    queues.close()
    assert queues.ready(1)
    assert queues.num_kept == 0
    queues.offer(step(0, 1))
    assert queues.num_kept == 0
    with pytest.raises(CancelledError, match="closed"):
        queues.take(0, 0)
