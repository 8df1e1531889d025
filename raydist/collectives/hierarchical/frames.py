"""What leaders tell each other about a call, and messages about themselves: a line of text, and how much follows it."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import final

import torch

from raydist.collectives.wires.channel import Passage, bytes_of

__all__ = ["FRAME_HEAD_BYTES", "Frame", "FrameArrival", "Head"]

_HEAD = struct.Struct("!BQ")
_AGREED, _NOTED = 1, 2
FRAME_HEAD_BYTES = 320  # of whole cache lines: what follows begins on one


@final
@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a frame.

    Attributes:
        agreed: Whether those for whom it speaks are of one mind; if not, what follows is what each of them says.
        num_bytes: What follows.
        text: What is called.
        noted: Whether one of them has marked the call.

    >>> Head.decode(Head(True, 8, b"all_reduce(SUM)").encode())
    Head(agreed=True, num_bytes=8, text=b'all_reduce(SUM)', noted=False)
    """

    agreed: bool
    num_bytes: int
    text: bytes
    noted: bool = False

    def encode(self) -> bytes:
        flags = _AGREED * self.agreed + _NOTED * self.noted
        return _HEAD.pack(flags, self.num_bytes) + self.text.ljust(FRAME_HEAD_BYTES - _HEAD.size)

    @staticmethod
    def decode(data: bytes | memoryview | torch.Tensor) -> Head:
        raw = bytes(data.numpy()) if isinstance(data, torch.Tensor) else bytes(data)
        flags, num_bytes = _HEAD.unpack(raw[: _HEAD.size])
        return Head(bool(flags & _AGREED), num_bytes, raw[_HEAD.size :].rstrip(), bool(flags & _NOTED))


_NONE = Head(False, 0, b"")


@final
class Frame:
    """Memory for a frame, to be used as often as one of its length is wanted.

    Args:
        num_bytes: Of what follows the head.

    Attributes:
        num_bytes: As given.
        memory: All of it.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        whole = torch.empty(FRAME_HEAD_BYTES + num_bytes, dtype=torch.uint8)
        self.memory = bytes_of(whole)
        self._body = whole[FRAME_HEAD_BYTES:]
        self._bodies: dict[torch.dtype, torch.Tensor] = {}

    def body(self, dtype: torch.dtype) -> torch.Tensor:
        """What follows the head, as a flat tensor; the same object each time, as making one takes 2 us."""
        known = self._bodies.get(dtype)
        if known is None:
            known = self._bodies[dtype] = self._body.view(dtype)
        return known


@final
class FrameArrival(Passage):
    """A frame on its way here: as long as its head says.

    Args:
        peer: Who sends it.
        used: Memory that is free, taken where it is as long; whatever its length, the head lands there.

    Attributes:
        head: Once it has come.
        frame: Where what follows it is, from then on.
    """

    __slots__ = ("frame", "head")

    def __init__(self, peer: int, used: Frame) -> None:
        super().__init__(peer, used.memory[:FRAME_HEAD_BYTES])
        self.frame = used
        self.head = _NONE

    def _next(self) -> memoryview:
        if self.head is not _NONE:
            return super()._next()
        self.head = head = Head.decode(self.frame.memory[:FRAME_HEAD_BYTES])
        if head.num_bytes != self.frame.num_bytes:
            self.frame = Frame(head.num_bytes)
        return self.frame.memory[FRAME_HEAD_BYTES:]
