"""The rules of the queues, driven by events: every replica sees every entry once and in order, within the credits."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from raydist.actors.passes.batch_queues import BatchQueues, Position, QueueEntry
from raydist.actors.passes.piece import StepBatch
from raydist.errors import CancelledError, FailedPreconditionError
from raydist.nest import LEAF

NUM_REPLICAS = 3
CAPACITY = 4


def step(number: int, replicas: int = NUM_REPLICAS) -> QueueEntry:
    refs = tuple(f"{number}/{rank}" for rank in range(replicas))
    batch = StepBatch(number, refs, (None,) * replicas, (1,) * replicas, LEAF)
    return QueueEntry(number, {"after": number + 1}, batch=batch)


class QueueMachine(RuleBasedStateMachine):
    """Replicas read at their own pace, lose answers, stop and go on; the producer uses every credit it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.queues = BatchQueues(num_replicas=NUM_REPLICAS, capacity=CAPACITY, start={"after": 0})
        self.produced = 0
        self.used = [0] * NUM_REPLICAS
        self.ended = False

    @precondition(lambda self: self.queues.wants_more)
    @rule()
    def produce(self) -> None:
        self.queues.offer(step(self.produced))
        self.produced += 1

    @precondition(lambda self: self.queues.wants_more)
    @rule()
    def end(self) -> None:
        self.queues.offer(QueueEntry(self.produced, {"after": self.produced}, last=True))
        self.ended = True

    @rule(rank=st.integers(0, NUM_REPLICAS - 1), ahead=st.integers(0, CAPACITY), most=st.integers(1, 5))
    def take(self, rank: int, ahead: int, most: int) -> None:
        start = self.used[rank] + ahead
        for offset, entry in enumerate(self.queues.take(rank, start, most)):
            assert entry.number == start + offset
            if entry.batch is not None:
                assert entry.batch.refs[rank] == f"{entry.number}/{rank}"
                assert [ref for ref in entry.batch.refs if ref is not None] == [entry.batch.refs[rank]]

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
            numbers = [entry.number for entry in self.queues.take(rank, used, 100)]
            assert numbers == list(range(used, self.produced + self.ended))

    @invariant()
    def credits_are_kept(self) -> None:
        assert self.queues.num_kept <= CAPACITY
        assert self.ended or self.queues.wants_more == (self.produced - min(self.used) < CAPACITY)


TestQueues = QueueMachine.TestCase


def test_the_driver_reads_for_all() -> None:
    queues = BatchQueues(num_replicas=2, capacity=2, start={})
    queues.offer(step(0, 2))
    queues.offer(step(1, 2))
    assert not queues.wants_more
    first, _ = queues.take(None, 0, 5)
    assert first.batch is not None
    assert first.batch.refs == ("0/0", "0/1")
    queues.acknowledge(None, 1)
    assert queues.wants_more
    assert queues.num_kept == 1


def test_old_acknowledgements_change_nothing() -> None:
    queues = BatchQueues(num_replicas=1, capacity=3, start={})
    for number in range(3):
        queues.offer(step(number, 1))
    queues.acknowledge(0, 2)
    queues.acknowledge(0, 1)
    assert queues.position_of(0) == Position(2, {"after": 2})
    queues.acknowledge(0, 3)
    assert queues.position_of(0) == Position(3, {"after": 3})


def test_an_entry_that_all_are_done_with_cannot_be_read_again() -> None:
    queues = BatchQueues(num_replicas=1, capacity=2, start={})
    queues.offer(step(0, 1))
    queues.acknowledge(0, 1)
    with pytest.raises(FailedPreconditionError, match="Batch 0"):
        queues.take(0, 0, 1)


def test_nothing_follows_the_end() -> None:
    queues = BatchQueues(num_replicas=1, capacity=2, start={})
    queues.offer(QueueEntry(0, {}, last=True))
    assert not queues.wants_more
    queues.acknowledge(0, 1)
    assert [entry.last for entry in queues.take(0, 0, 1)] == [True]
    with pytest.raises(FailedPreconditionError, match="raydist bug"):
        queues.offer(step(1, 1))


def test_close_wakes_readers_and_drops_everything() -> None:
    queues = BatchQueues(num_replicas=1, capacity=2, start={})
    queues.offer(step(0, 1))
    assert not queues.ready(1)
    queues.close()
    assert queues.ready(1)
    assert queues.num_kept == 0
    queues.offer(step(0, 1))
    assert queues.num_kept == 0
    with pytest.raises(CancelledError, match="closed"):
        queues.take(0, 0, 1)
