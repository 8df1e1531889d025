from __future__ import annotations

import time
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore

from raydist.collectives.base import Membership
from raydist.collectives.xla.meeting import XlaMeeting
from raydist.errors import CollectiveMismatchError


class Line:
    """A neighbour that lives as long as it is told to."""

    def __init__(self, rank: int) -> None:
        self.rank = (rank + 1) % 2
        self.gone = False

    def is_gone(self) -> bool:
        return self.gone


class CountedStore(HashStore):
    """Counts entries; and replaces, which torch's HashStore does otherwise for keys that are not there."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: set[str] = set()

    def set(self, key: str, value: Any) -> None:
        self.keys.add(key)
        super().set(key, value)


@pytest.fixture
def entries() -> CountedStore:
    return CountedStore()


@pytest.fixture
def lines() -> list[Line]:
    return [Line(0), Line(1)]


@pytest.fixture
def two(entries: CountedStore, lines: Any) -> list[XlaMeeting]:
    return [XlaMeeting(PrefixStore("g/0", entries), Membership("g", 0, rank, 2), lines[rank]) for rank in (0, 1)]


def soon() -> float:
    return time.monotonic() + 0.02


def test_nobody_goes_on_alone(two: list[XlaMeeting]) -> None:
    two[0].announce("sum")
    assert not two[0].all_agree(soon())
    two[1].announce("sum")
    assert two[0].all_agree(soon())
    assert two[1].all_agree(soon())


def test_those_who_differ_are_told_alike(two: list[XlaMeeting]) -> None:
    two[0].announce("sum of 3")
    two[1].announce("sum of 4")
    for meeting in two:
        with pytest.raises(CollectiveMismatchError, match="rank 0: sum of 3; rank 1: sum of 4"):
            meeting.all_agree(soon())
    for meeting in two:  # and can go on
        meeting.announce("barrier")
    assert [meeting.all_agree(soon()) for meeting in two] == [True, True]
    assert [meeting.decide(go=True) for meeting in two] == [True, True]


def test_the_first_answer_is_everyones(two: list[XlaMeeting]) -> None:
    for meeting in two:
        meeting.announce("sum")
    assert two[1].decide(go=True)
    assert two[0].decide(go=False)  # too late to give up: the other one is on its way
    for meeting in two:
        meeting.announce("sum")
    assert not two[0].decide(go=False)
    assert not two[1].decide(go=True)


def test_a_rank_that_is_ahead_is_not_mistaken(two: list[XlaMeeting]) -> None:
    two[0].announce("first")
    two[1].announce("first")
    assert two[1].all_agree(soon())
    two[1].announce("second")
    assert two[0].all_agree(soon())
    two[0].announce("second")
    assert two[0].all_agree(soon())


def test_the_store_does_not_grow(two: list[XlaMeeting], entries: CountedStore) -> None:
    for _ in range(20):
        for meeting in two:
            meeting.announce("sum")
        assert all(meeting.all_agree(soon()) and meeting.decide(go=True) for meeting in two)
    assert len(entries.keys) <= 5


def test_a_neighbour_that_is_gone(two: list[XlaMeeting], lines: list[Line]) -> None:
    two[0].announce("sum")
    lines[0].gone = True
    with pytest.raises(ConnectionError, match="connection closed by rank 1"):
        two[0].all_agree(time.monotonic() + 5)
    two[1].announce("sum")  # what it said before it left counts
    assert two[0].all_agree(soon())
