"""A reader's questions: in groups, one ahead, never twice for the same entry unless it gave something back."""

from __future__ import annotations

from typing import Any

import pytest

from raydist.actors.epochs.batch_queues import QueueEntry
from raydist.actors.epochs.served_epoch import Poll
from raydist.actors.readers.step_reader import StepReader
from raydist.core.errors import DeadlineExceededError
from raydist.options import Timeouts


class ScriptedLink:
    """Answers polls from a list of entries, up to what its credits allow."""

    name = "scripted"

    def __init__(self, num_entries: int, capacity: int = 4, input_s: float = 5.0, most: int = 3) -> None:
        self.most = most
        self.timeouts = Timeouts(poll_s=0.01, input_s=input_s)
        self.entries = [QueueEntry(n, ({},)) for n in range(num_entries)]
        self.entries.append(QueueEntry(num_entries, ({},), last=True))
        self.capacity = capacity
        self.asked: list[Poll] = []
        self.calls: list[tuple[Any, ...]] = []
        self.told = 0

    def acknowledge(self, poll: Poll, rank: int | None, done: int) -> None:
        self.told = max(self.told, done)

    def ask(self, poll: Poll) -> Poll:
        self.asked.append(poll)
        return poll

    def is_answered(self, poll: Poll, stop: Any = None, timeout_s: float | None = None) -> bool:
        return bool(self.found(poll))

    def found(self, poll: Poll) -> tuple[QueueEntry, ...]:
        there = self.entries[: max(poll.done, self.told) + self.capacity]
        return tuple(there[poll.start : poll.start + self.most])

    def receive(self, poll: Poll) -> tuple[QueueEntry, ...]:
        return self.found(poll)

    def call(self, method: str, *args: Any) -> None:
        self.calls.append((method, *args))


def make_reader(link: Any, start: int = 0) -> StepReader:
    return StepReader(link, rank=None, start=start)


@pytest.mark.parametrize("group", [1, 2, 3, 5])
def test_every_place_once_and_the_last_for_ever(group: int) -> None:
    reader = make_reader(ScriptedLink(10, capacity=group + 1, most=group))
    assert [reader.next_place().number for _ in range(13)] == [*range(10), 10, 10, 10]
    assert reader.position == 10


def test_questions_are_few_and_ahead() -> None:
    link = ScriptedLink(8, capacity=5, most=4)
    reader = make_reader(link)
    for _ in range(8):
        reader.next_place()
    starts = [poll.start for poll in link.asked]
    assert starts == sorted(set(starts))
    assert len(starts) <= 5


def test_only_what_is_no_longer_in_use_is_acknowledged() -> None:
    link = ScriptedLink(5, capacity=2, most=1)
    reader = make_reader(link)
    for number in range(5):
        assert reader.next_place().number == number
        assert link.asked[-1].done == number  # this entry is in use


class WideLink(ScriptedLink):
    """Entries of four places; the next one is made when the reader is known to be within the credit of it."""

    def __init__(self, num_entries: int, credit: int) -> None:
        super().__init__(0)
        self.credit = credit
        self.entries = [QueueEntry(4 * n, ({},) * 4) for n in range(num_entries)]
        self.answers: list[int] = []

    def found(self, poll: Poll) -> tuple[QueueEntry, ...]:
        made = [entry for entry in self.entries if entry.number < max(poll.done, self.told) + self.credit]
        return tuple(entry for entry in made if entry.number >= poll.start)

    def receive(self, poll: Poll) -> tuple[QueueEntry, ...]:
        self.answers.append(len(self.found(poll)))
        return self.found(poll)


def test_a_pass_without_credit_hears_how_far_the_reader_is_before_that_waits() -> None:
    link = WideLink(5, credit=4)
    reader = make_reader(link)
    assert [reader.next_place().number for _ in range(20)] == list(range(20))
    assert 0 not in link.answers  # an answer with nothing in it has waited for `poll_s`


def test_what_was_read_ahead_can_be_given_back() -> None:
    link = ScriptedLink(10, capacity=5, most=4)
    reader = make_reader(link)
    reader.next_place()
    reader.give_back("release", 3)
    assert link.calls == [("release", 3, 1)]
    assert reader.next_place().number == 1


def grouped(*sizes: int) -> list[QueueEntry]:
    """Entries of so many places each, then the end."""
    entries, number = [], 0
    for size in sizes:
        entries.append(QueueEntry(number, tuple({"after": number + place + 1} for place in range(size))))
        number += size
    return [*entries, QueueEntry(number, ({"after": number},), last=True)]


def test_places_of_a_group_have_their_own_states_and_reading_may_begin_within_one() -> None:
    link = ScriptedLink(0, capacity=9, most=9)
    link.entries = grouped(3, 2)
    reader = make_reader(link)
    places = [reader.next_place() for _ in range(6)]
    assert [(place.number, place.state["after"]) for place in places] == [(n, min(n + 1, 5)) for n in range(6)]
    within = make_reader(link, start=1)
    assert [within.next_place().number for _ in range(3)] == [1, 2, 3]


def test_one_question_a_group() -> None:
    link = ScriptedLink(0)
    link.entries = grouped(8, 8, 8)
    link.receive = lambda poll: tuple(entry for entry in link.entries if entry.number == poll.start)  # type: ignore[method-assign]
    reader = make_reader(link)
    for _ in range(24):
        reader.next_place()
    assert [(poll.start, poll.done) for poll in link.asked] == [(0, 0), (8, 0), (16, 8), (24, 16)]


def test_the_wait_for_an_element_has_a_limit() -> None:
    link = ScriptedLink(3, capacity=0, input_s=0.05)
    with pytest.raises(DeadlineExceededError, match=r"Timeouts\.input_s"):
        make_reader(link).next_place()
