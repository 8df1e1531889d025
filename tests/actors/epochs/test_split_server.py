from __future__ import annotations

from typing import Any

from raydist.actors.epochs.batch_queues import QueueEntry
from raydist.actors.epochs.dynamic_sharding import InputSplit, SplitServer
from raydist.actors.epochs.served_epoch import Poll


class Pass:
    """Entries of two places each; the end after six."""

    def __init__(self) -> None:
        self.polls: list[Poll] = []
        self.slow = False

    def poll(self, poll: Poll) -> tuple[QueueEntry, ...]:
        self.polls.append(poll)
        if self.slow:
            return ()
        return (QueueEntry(poll.start, ({},), last=True) if poll.start >= 6 else QueueEntry(poll.start, ({}, {})),)


def places(split: InputSplit | None) -> tuple[int, int] | None:
    return None if split is None else (split.entry.number + split.begin, split.entry.end)


def test_each_split_goes_to_one_reader_and_the_end_to_all() -> None:
    served: Any = Pass()
    split_server = SplitServer(served)
    assert [places(split_server.claim((number % 2, 0), 0)) for number in range(3)] == [(0, 2), (2, 4), (4, 6)]
    for worker in range(2):
        split = split_server.claim((worker, 0), 0)
        assert split is not None
        assert split.entry.last


def test_where_there_is_none_yet_the_reader_asks_again() -> None:
    served: Any = Pass()
    split_server = SplitServer(served)
    served.slow = True
    assert split_server.claim((0, 0), 0) is None
    served.slow = False
    assert places(split_server.claim((0, 0), 0)) == (0, 2)


def test_the_unused_rest_of_a_reader_that_died_comes_before_anything_new() -> None:
    served: Any = Pass()
    split_server = SplitServer(served)
    split_server.claim((0, 0), 0)
    split_server.claim((0, 0), 0)
    split_server.lost((0, 0), 1)
    assert [places(split_server.claim((1, 0), 0)) for _ in range(3)] == [(1, 2), (2, 4), (4, 6)]
