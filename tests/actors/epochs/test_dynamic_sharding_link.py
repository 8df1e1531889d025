from __future__ import annotations

from typing import Any

from raydist.actors.epochs.batch_queues import QueueEntry
from raydist.actors.epochs.dynamic_sharding import InputSplit
from raydist.actors.epochs.link import DynamicShardingLink
from raydist.actors.epochs.served_epoch import Poll
from raydist.options import Timeouts


class Link:
    """Answers claims with what it was given."""

    def __init__(self, *splits: InputSplit | None) -> None:
        self.splits = list(splits)
        self.claims: list[Any] = []
        self.timeouts, self.on_host = Timeouts(), False

    def claim(self, reader: Any, used: int) -> Any:
        self.claims.append((reader, used))
        return self.splits.pop(0)

    def receive_split(self, asked: Any) -> Any:
        return asked


def test_places_are_numbered_as_they_come_to_this_worker() -> None:
    inner: Any = Link(
        InputSplit(QueueEntry(10, ({}, {}, {})), begin=1),
        None,
        InputSplit(QueueEntry(40, ({},))),
        InputSplit(QueueEntry(41, ({},), last=True)),
    )
    link = DynamicShardingLink(inner, (3, 1))
    poll = Poll(0, start=0, done=0, wait_s=1.0)
    found = []
    for _ in range(4):
        link.used += 1
        found.append([(entry.number, entry.end, entry.last) for entry in link.receive(link.ask(poll))])
    assert found == [[(-1, 2, False)], [], [(2, 3, False)], [(3, 4, True)]]
    assert inner.claims == [((3, 1), used) for used in (1, 2, 3, 4)]
    assert link.call("position_of", 0).number == 3
