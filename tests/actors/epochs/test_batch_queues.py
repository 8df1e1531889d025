"""Queues of an epoch and their credits. That each replica gets every entry once: `test_epoch_producer.py`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.actors.epochs.batch_group import BatchGroup
from raydist.actors.epochs.epoch_producer import Credits
from raydist.actors.epochs.served_epoch import BatchQueues, QueueEntry
from raydist.core.errors import CancelledError, FailedPreconditionError
from raydist.core.nest import LEAF


def steps(number: int, count: int = 1, replicas: int = 1) -> QueueEntry:
    """A group of `count` steps."""
    refs = tuple(f"{number}/{rank}" for rank in range(replicas))
    group = BatchGroup(number, refs, ((1,) * replicas,) * count, LEAF)
    return QueueEntry(number, tuple({"after": number + place + 1} for place in range(count)), group=group)


def test_the_driver_reads_for_all() -> None:
    queues = BatchQueues(num_replicas=2, start={})
    queues.offer(steps(0, replicas=2), 10)
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
    queues.offer(steps(0))
    queues.acknowledge(0, 1)
    with pytest.raises(FailedPreconditionError, match="Batch 0"):
        queues.take(0, 0)
    queues.offer(QueueEntry(1, ({},), last=True))
    assert queues.finished
    queues.acknowledge(0, 2)
    assert [entry.last for entry in queues.take(0, 1)] == [True]
    with pytest.raises(FailedPreconditionError, match="raydist bug"):
        queues.offer(steps(2))


def test_close_wakes_readers_and_drops_everything() -> None:
    queues = BatchQueues(num_replicas=1, start={})
    queues.offer(steps(0))
    assert not queues.ready(1)
    queues.close()
    assert queues.ready(1)
    assert queues.num_kept == 0
    queues.offer(steps(0))
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
