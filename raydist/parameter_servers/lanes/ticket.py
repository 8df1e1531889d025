"""The memory layout of a lane, and the ticket by which a worker opens it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from raydist.channels.layout import ChannelLayout

__all__ = ["HALL_BELL", "HALL_BYTES", "LANE", "READS", "SERVER", "WORKER", "LaneTicket"]

LANE = ChannelLayout(num_ends=1)
"""Layout of a lane: a channel with the server as hub and one end."""
SERVER, WORKER = 0, 1
"""Slots by which server and worker show in a lane's segment that they live; the server's also exists in the hall's."""

READS = LANE.bell(SERVER) + 8
"""Counters of the worker's reads of the server's values, and of their bytes: the server sees no request for them.
They lie behind the server's bell, which is not rung."""

HALL_BYTES = 2 * 4096
"""Size of the memory with the one bell that all lanes of a server ring."""
HALL_BELL = 4096


@final
@dataclass(frozen=True, slots=True)
class LaneTicket:
    """The address of a lane for another process of the host.

    Attributes:
        server: Name of the server, for messages.
        name: Name of the lane's segment.
        token: First bytes of the lane's segment.
        hall: Name of the segment with the server's bell.
        hall_token: First bytes of this segment.
    """

    server: str
    name: str
    token: bytes
    hall: str
    hall_token: bytes
