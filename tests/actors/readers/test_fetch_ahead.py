from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from raydist.actors.epochs.batch_group import BatchGroup, StepBatch
from raydist.actors.epochs.batch_queues import QueueEntry
from raydist.actors.epochs.served_epoch import Poll
from raydist.actors.readers.replica_iterator import FetchAhead
from raydist.actors.readers.step_reader import StepReader
from raydist.core.errors import DeadlineExceededError, UnavailableError
from raydist.core.nest import LEAF
from raydist.options import Timeouts


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


def test_giving_up_takes_no_entry() -> None:
    ahead = make(StepLink(1), Fetch())
    ahead.next_place()
    assert ahead.close().position == 1


def test_a_step_that_does_not_come_is_late() -> None:
    link = StepLink(1, input_s=0.1)
    ahead = make(link, Fetch())
    ahead.next_place()
    with pytest.raises(DeadlineExceededError, match=r"pipeline steps must come within 0\.1 s \(Timeouts\.input_s\)"):
        ahead.next_place()
    link.made = 2
    assert ahead.next_place()[1] == [10]
    ahead.close()


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
