"""How messages of a step channel begin: what they are, and a number."""

from __future__ import annotations

import struct

from raydist.channels.layout import MESSAGE_BYTES

__all__ = ["DONE", "HEAD", "KEPT", "LEAVE", "MOST_BYTES", "STEPS", "answered_by", "wants_answer"]

STEPS, LEAVE = 0, 1
"""What the driver sends: steps under a number, or the word to end the turn of a number."""
DONE, KEPT = 0, 1
"""What a replica sends: the result of the steps of a number, or that it keeps this until it is asked by Ray."""
HEAD = struct.Struct("<BQ")
MOST_BYTES = MESSAGE_BYTES - HEAD.size
"""Behind a head."""


def wants_answer(message: bytes) -> int | None:
    """The number under which a message of the driver's is answered, if it is."""
    kind, number = HEAD.unpack_from(message)
    return number if kind == STEPS else None


def answered_by(message: bytes) -> tuple[int, bool]:
    """The number of what a message of a replica's answers, and whether the answer itself is to be asked for."""
    kind, number = HEAD.unpack_from(message)
    return number, kind == KEPT
