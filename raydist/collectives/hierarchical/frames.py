"""What leaders tell each other about a call, and messages about themselves: a line of text, and how much follows it."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import final

import torch

__all__ = ["FRAME_HEAD_BYTES", "Head"]

_HEAD = struct.Struct("!BQ")
_AGREED, _NOTED = 1, 2
FRAME_HEAD_BYTES = 256 + _HEAD.size


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
    def decode(data: bytes | torch.Tensor) -> Head:
        raw = bytes(data.numpy()) if isinstance(data, torch.Tensor) else data
        flags, num_bytes = _HEAD.unpack(raw[: _HEAD.size])
        return Head(bool(flags & _AGREED), num_bytes, raw[_HEAD.size :].rstrip(), bool(flags & _NOTED))
