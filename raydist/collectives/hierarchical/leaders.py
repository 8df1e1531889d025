"""Frames between the leaders of hosts: each tells all others one, and hears one of each."""

from __future__ import annotations

from collections.abc import Generator
from typing import final

from raydist.collectives.hierarchical.frames import FRAME_HEAD_BYTES, Frame, FrameArrival, Head
from raydist.collectives.hierarchical.plan import HostPlan, rounds
from raydist.collectives.shared_memory.task import Condition
from raydist.collectives.wires.channel import Passage
from raydist.collectives.wires.landed import Landed
from raydist.collectives.wires.wires import Wires

__all__ = ["Heard", "LeaderFrames"]

Heard = dict[int, tuple[Head, Frame]]
"""What each other host has told, by its index; a frame is to be read before the next ones are heard."""


@final
class LeaderFrames:
    """Those of one leader, whose memory is used again: making it takes longer than adding up what it holds.

    Args:
        plan: Who speaks for whom.
        wires: To the other leaders, connected already.
    """

    def __init__(self, plan: HostPlan, wires: Wires) -> None:
        pairs = rounds(len(plan.hosts), plan.host)
        self._outgoing = [wires.channel_to(plan.hosts[to][0]) for to, _ in pairs]
        self._incoming = [
            (source, plan.hosts[source][0], wires.channel_from(plan.hosts[source][0])) for _, source in pairs
        ]
        self._told = Frame(0)
        self._under_way: list[Passage] = []
        self._heard = {source: Frame(0) for _, source in pairs}

    def next(self, num_bytes: int) -> Frame:
        """Memory for what is told next."""
        if self._told.num_bytes != num_bytes or not all(passage.done for passage in self._under_way):
            self._told = Frame(num_bytes)
        return self._told

    def tell(self, head: Head, frame: Frame) -> None:
        """Send a frame to all others: what follows its head stands there already. Does not wait."""
        frame.memory[:FRAME_HEAD_BYTES] = head.encode()
        self._under_way = [channel.start(frame.memory) for channel in self._outgoing]

    def hear(self) -> Generator[Condition, None, Heard]:
        """What the others tell, one after the other: who waits for all at once is woken by each.

        All have told before they hear, so that nobody waits for what comes after the one that it waits for.
        """
        heard: Heard = {}
        for host, leader, channel in self._incoming:
            arrival = FrameArrival(leader, self._heard[host])
            channel.carry(arrival)
            if not arrival.done:
                yield Landed([arrival])
            self._heard[host] = arrival.frame
            heard[host] = arrival.head, arrival.frame
        return heard
