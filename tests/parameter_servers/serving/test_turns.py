from __future__ import annotations

import raydist as rd
from raydist.parameter_servers.requests import PushKey, Sender
from raydist.parameter_servers.serving.sync_steps import Accepted, Turns

ONE, OTHER = Sender(0, 0), Sender(1, 0)


def in_steps(backups: int = 0) -> Turns:
    turns = Turns(rd.SyncWithBackups(backups))
    turns.begin(ONE, 0)
    turns.begin(OTHER, 1)
    return turns


def test_nobody_waits_without_a_rule() -> None:
    turns = Turns("async")
    for closure in range(5):
        turns.begin(ONE, closure)
    assert (turns.in_steps, turns.decide(), turns.arrive(ONE, PushKey(0, 0), 0)) == (False, None, None)
    assert turns.fence(ONE) is None


def test_an_arrival_that_is_told_twice_counts_once() -> None:
    turns = in_steps()
    first = turns.arrive(ONE, PushKey(0, 0), 0)
    again = turns.arrive(ONE, PushKey(0, 0), 0)
    assert first is not None
    assert first == again
    assert turns.accepted(first) is None
    second = turns.arrive(OTHER, PushKey(1, 0), 0)
    assert second is not None
    assert turns.accepted(first) == turns.accepted(second) == Accepted(0, 2)
    assert turns.arrive(ONE, PushKey(0, 0), 0) == first


def test_what_the_dead_were_accepted_with_is_never_late() -> None:
    """Some servers may have it: the others must get it."""
    turns = in_steps()
    turns.arrive(ONE, PushKey(0, 0), 0)
    turns.arrive(OTHER, PushKey(1, 0), 0)
    assert turns.fence(ONE) == Accepted(0, 2)
    successor = Sender(0, 1)
    turns.begin(successor, 0)
    assert turns.fence(ONE) == Accepted(0, 2)  # told twice
    owed = turns.arrive(successor, PushKey(0, 0), 0)
    assert owed is not None
    assert owed.step == 1
    assert turns.arrive(successor, PushKey(0, 1), 0) is None
    turns.fence(successor)  # before it was decided
    again = Sender(0, 2)
    turns.begin(again, 0)
    owed = turns.arrive(again, PushKey(0, 0), 0)
    assert owed is not None
    other = turns.arrive(OTHER, PushKey(1, 1), 1)
    assert other is not None
    assert turns.accepted(owed) == turns.accepted(other) == Accepted(1, 2)


def test_the_dead_who_were_not_accepted_leave_nothing_behind() -> None:
    turns = in_steps()
    turns.arrive(ONE, PushKey(0, 0), 0)
    assert turns.fence(ONE) is None
    alone = turns.arrive(OTHER, PushKey(1, 0), 0)
    assert alone is not None
    assert turns.accepted(alone) == Accepted(0, 1)
    assert turns.arrive(Sender(0, 1), PushKey(0, 0), 0) is None


def test_what_has_ended_is_owed_no_more() -> None:
    turns = in_steps(1)
    turns.arrive(ONE, PushKey(0, 0), 0)
    assert turns.fence(ONE) == Accepted(0, 1)
    assert turns.arrive(OTHER, PushKey(1, 0, finished_below=1), 0) is None
    assert turns._owed == set()
