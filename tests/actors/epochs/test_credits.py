from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.actors.epochs.epoch_producer import Credits

MIB = 1 << 20


def allow(credit: Credits, ahead: int, held: int = 0, step: int = 0, pace_s: float | None = 0.001) -> bool:
    return credit.allow(ahead=ahead, held_bytes=held, step_bytes=step, pace_s=pace_s)


def test_what_the_user_asked_for_is_the_limit() -> None:
    credit = Credits.within(None, 6, 2, only_capacity=True)
    assert [allow(credit, ahead) for ahead in (5, 6, 7)] == [True, False, False]
    assert credit.group_steps(0.001) == 3  # the other half is in use meanwhile
    assert Credits(capacity=2).group_steps(0.001) == 1


def test_small_steps_may_be_further_ahead_of_a_quick_reader() -> None:
    credit = Credits.within(None, 3, 2, only_capacity=False)
    assert credit.spare_bytes == 192 * MIB
    assert credit.group_bytes == 32 * MIB
    assert allow(credit, 100, held=10 * MIB, step=MIB)
    assert not allow(credit, 100, held=192 * MIB, step=1)
    assert not allow(credit, 3 * 128)


def test_nothing_is_made_ahead_for_a_reader_of_whom_nothing_is_known() -> None:
    credit = Credits.within(None, 3, 2, only_capacity=False)
    assert [allow(credit, ahead, pace_s=None) for ahead in (2, 3)] == [True, False]
    assert credit.group_steps(None) == 1


@pytest.mark.parametrize(("pace_s", "steps"), [(0.0, 128), (0.0001, 128), (0.01, 50), (0.3, 1), (10.0, 1)])
def test_a_group_is_half_a_second_of_work(pace_s: float, steps: int) -> None:
    credit = Credits.within(None, 3, 2, only_capacity=False)
    assert credit.group_steps(pace_s) == steps
    assert allow(credit, 3 * steps - 1, pace_s=pace_s)
    assert not allow(credit, max(3, 3 * steps), pace_s=pace_s)


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
