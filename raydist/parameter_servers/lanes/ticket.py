"""How a lane lies in memory, and by what a worker finds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from raydist.channels.layout import ChannelLayout

__all__ = ["HALL_BELL", "HALL_BYTES", "LANE", "READS", "SERVER", "WORKER", "LaneTicket"]

LANE = ChannelLayout(num_ends=1)
"""Of a lane: a channel whose hub is the server, and that has one end."""
SERVER, WORKER = 0, 1
"""Who shows to live in a lane's segment; the server does in the hall's too."""

READS = LANE.bell(SERVER) + 8
"""Where a worker counts its reads of the server's values, and their bytes: the server is not asked for them. The bell
before it is not rung."""

HALL_BYTES = 2 * 4096
"""Of the memory with the one bell that all lanes of a server ring."""
HALL_BELL = 4096


@final
@dataclass(frozen=True, slots=True)
class LaneTicket:
    """What a lane is opened with, in another process of the host.

    Attributes:
        server: The server, for messages.
        name: Of the lane's segment.
        token: What it begins with.
        hall: Name of the segment with the server's bell.
        hall_token: What that begins with.
    """

    server: str
    name: str
    token: bytes
    hall: str
    hall_token: bytes
