"""The polls of a reader: one ahead of its work, and each entry once. And the prefetch of pieces."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from raydist.actors.epochs.batch_group import BatchGroup, StepBatch
from raydist.actors.epochs.served_epoch import Poll, QueueEntry
from raydist.actors.readers.replica_iterator import FetchAhead
from raydist.actors.readers.step_reader import StepReader
from raydist.core.errors import DeadlineExceededError, UnavailableError
from raydist.core.nest import LEAF
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


def test_only_what_is_no_longer_in_use_is_acknowledged_and_the_rest_can_be_given_back() -> None:
    link = ScriptedLink(5, capacity=2, most=1)
    reader = make_reader(link)
    for number in range(5):
        assert reader.next_place().number == number
        assert link.asked[-1].done == number  # this entry is in use
    link = ScriptedLink(10, capacity=5, most=4)
    reader = make_reader(link)
    reader.next_place()
    reader.give_back("release", 3)
    assert link.calls == [("release", 3, 1)]
    assert reader.next_place().number == 1


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


def test_the_wait_for_an_element_has_a_limit_and_goes_on_after_an_answer_without_any() -> None:
    with pytest.raises(DeadlineExceededError, match=r"Timeouts\.input_s"):
        make_reader(ScriptedLink(3, capacity=0, input_s=0.05)).next_place()
    link: Any = ScriptedLink(3)
    answers = iter([(), (), link.entries[:1]])
    link.receive = lambda poll: tuple(next(answers))
    assert make_reader(link).next_place().number == 0


# --- prefetch of pieces -----------------------------------------------------------------------------------------------


class StepLink:
    """Answers with steps, up to the number that was made."""

    name = "steps"

    def __init__(self, made: int, input_s: float = 20.0, together: int = 1) -> None:
        self.together = together
        self.timeouts = Timeouts(poll_s=0.01, input_s=input_s)
        self.made = made
        self.broken = False

    def ask(self, poll: Poll) -> Poll:
        return poll

    def acknowledge(self, poll: Poll, rank: int | None, done: int) -> None:
        """Nothing here is made for want of news."""

    def is_answered(self, poll: Poll, stop: Future[None] | None = None, timeout_s: float | None = None) -> bool:
        while poll.start >= self.made:
            if timeout_s is not None or (stop is not None and stop.done()):
                return False
            threading.Event().wait(0.01)
        return True

    def receive(self, poll: Poll) -> tuple[QueueEntry, ...]:
        if self.broken:
            raise UnavailableError("the pipeline is gone")
        end = min(self.made, poll.start + self.together)
        if poll.start >= end:
            return ()
        group = BatchGroup(poll.start, (), ((),) * (end - poll.start), LEAF)
        entry = QueueEntry(poll.start, ({},) * (end - poll.start), group=group)
        return (entry, QueueEntry(end, ({},), last=True)) if end == 9 else (entry,)


class Fetch:
    """Notes which steps were fetched, and by which threads."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.threads: set[str] = set()
        self.fetched = threading.Semaphore(0)

    def __call__(self, batch: StepBatch) -> list[Any]:
        self.steps.append(batch.step)
        self.threads.add(threading.current_thread().name)
        self.fetched.release()
        return [batch.step * 10]


def make(link: StepLink, fetch: Fetch) -> FetchAhead:
    return FetchAhead(StepReader(link, rank=0, start=0), fetch)  # type: ignore[arg-type]  # a link's double


def test_every_piece_is_fetched_once_and_ahead() -> None:
    fetch = Fetch()
    ahead = make(StepLink(9), fetch)
    assert ahead.next_place()[1] == [0]
    for _ in range(2):
        assert fetch.fetched.acquire(timeout=20)
    assert fetch.steps == [0, 1], "the second piece came without being asked for"
    assert [ahead.next_place()[1] for _ in range(8)] == [[step * 10] for step in range(1, 9)]
    place, leaves = ahead.next_place()
    assert (place.last, leaves) == (True, [])
    assert fetch.steps == list(range(9))
    assert any(name.startswith("raydist-piece") for name in fetch.threads)
    assert ahead.close().position == 9


def test_quick_pieces_of_a_group_in_hand_are_copied_where_they_are_asked_for() -> None:
    fetch = Fetch()
    reader: Any = StepReader(StepLink(9, together=3), rank=0, start=0)  # type: ignore[arg-type]  # a link's double
    ahead = FetchAhead(reader, fetch, lambda batch: batch.place > 0)
    assert [ahead.next_place()[1] for _ in range(2)] == [[0], [10]]
    assert fetch.threads == {threading.current_thread().name}
    assert [ahead.next_place()[1] for _ in range(7)] == [[step * 10] for step in range(2, 9)]
    assert fetch.steps == list(range(9))
    assert len(fetch.threads) == 2, "the first piece of the next group came ahead"
    ahead.close()


def test_a_step_that_does_not_come_is_late() -> None:
    link = StepLink(1, input_s=0.1)
    ahead = make(link, Fetch())
    ahead.next_place()
    with pytest.raises(DeadlineExceededError, match=r"pipeline steps must come within 0\.1 s \(Timeouts\.input_s\)"):
        ahead.next_place()
    link.made = 2
    assert ahead.next_place()[1] == [10]
    assert ahead.close().position == 2, "what was not handed out is not taken"


def test_what_fails_ahead_fails_again_where_it_is_asked_for() -> None:
    link = StepLink(9)
    ahead = make(link, Fetch())
    link.made = 1
    ahead.next_place()
    link.broken = True
    link.made = 9
    with pytest.raises(UnavailableError):
        ahead.next_place()
    ahead.close()
