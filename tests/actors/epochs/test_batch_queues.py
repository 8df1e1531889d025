"""Queues of an epoch as a state machine: every replica gets every entry once and in order. And their credits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from raydist.actors.epochs.batch_group import BatchGroup
from raydist.actors.epochs.epoch_producer import Credits
from raydist.actors.epochs.served_epoch import BatchQueues, Position, QueueEntry
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


def test_neither_what_all_are_done_with_nor_what_follows_the_end_is_there() -> None:
    queues = BatchQueues(num_replicas=1, start={})
    queues.offer(step(0, 1))
    queues.acknowledge(0, 1)
    with pytest.raises(FailedPreconditionError, match="Batch 0"):
        queues.take(0, 0)
    queues.offer(QueueEntry(1, ({},), last=True))
    assert queues.finished
    queues.acknowledge(0, 2)
    assert [entry.last for entry in queues.take(0, 1)] == [True]
    with pytest.raises(FailedPreconditionError, match="raydist bug"):
        queues.offer(step(2, 1))


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


# --- credits ----------------------------------------------------------------------------------------------------------

MIB = 1 << 20


def allow(credit: Credits, ahead: int, held: int = 0, step: int = 0, pace_s: float | None = 0.001) -> bool:
    return credit.allow(ahead=ahead, held_bytes=held, step_bytes=step, pace_s=pace_s)


def test_what_the_user_asked_for_is_the_limit() -> None:
    credit = Credits.within(None, 6, 2, only_capacity=True)
    assert [allow(credit, ahead) for ahead in (5, 6, 7)] == [True, False, False]
    assert credit.group_steps(0.001) == 3  # the other half is in use meanwhile
    assert Credits(capacity=2).group_steps(0.001) == 1


def test_small_steps_may_be_further_ahead_of_a_quick_reader_but_not_of_an_unknown_one() -> None:
    credit = Credits.within(None, 3, 2, only_capacity=False)
    assert (credit.spare_bytes, credit.group_bytes) == (192 * MIB, 32 * MIB)
    assert allow(credit, 100, held=10 * MIB, step=MIB)
    assert not allow(credit, 100, held=192 * MIB, step=1)
    assert not allow(credit, 3 * 128)
    assert [allow(credit, ahead, pace_s=None) for ahead in (2, 3)] == [True, False]
    assert credit.group_steps(None) == 1


def test_a_group_is_half_a_second_of_work() -> None:
    credit = Credits.within(None, 3, 2, only_capacity=False)
    for pace_s, count in [(0.0, 128), (0.0001, 128), (0.01, 50), (0.3, 1), (10.0, 1)]:
        assert credit.group_steps(pace_s) == count
        assert allow(credit, 3 * count - 1, pace_s=pace_s)
        assert not allow(credit, max(3, 3 * count), pace_s=pace_s)


def test_a_small_object_store_is_not_filled() -> None:
    credit = Credits.within(80 * MIB, 9, 8, only_capacity=False)
    assert credit.spare_bytes == 10 * MIB
    assert credit.group_bytes * 8 * 3 <= 10 * MIB
    asked_for = Credits.within(80 * MIB, 99, 8, only_capacity=True)
    assert (asked_for.spare_bytes, asked_for.group_bytes) == (0, credit.group_bytes)


@given(
    capacity=st.integers(1, 100),
    replicas=st.integers(1, 16),
    ahead=st.integers(0, 300),
    held=st.integers(0, 1 << 31),
    step=st.integers(0, 1 << 31),
    pace_s=st.none() | st.floats(0, 10),
)
def test_memory_stays_put(capacity: int, replicas: int, ahead: int, held: int, step: int, pace_s: float | None) -> None:
    credit = Credits.within(None, capacity, replicas, only_capacity=False)
    if allow(credit, ahead, held, step, pace_s):
        assert ahead < capacity or held + step <= credit.spare_bytes
    if ahead < capacity:
        assert allow(credit, ahead, held, step, pace_s)
