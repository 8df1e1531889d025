"""Descriptions of calls, which the ranks of a group compare."""

from __future__ import annotations

import hashlib
from typing import final

import torch

from raydist.collectives.parts import describe_tensor
from raydist.collectives.shared_memory.control import CALL_BYTES

__all__ = ["CallTexts", "is_same_call", "shown_call"]

_TEXT_BYTES = CALL_BYTES - 8
_MOST_KNOWN = 1024
_MARK = b"\0"  # behind it stands what messages show instead, which is not compared


@final
class CallTexts:
    """Make the descriptions of a rank's calls; each is made once, since a program repeats a few."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, torch.dtype, torch.Size], bytes] = {}
        self._announced = b""

    def announce(self, what: str) -> None:
        """Show this of the next call."""
        self._announced = what.encode()

    def next_call(self, name: str, tensor: torch.Tensor | None) -> bytes:
        """Return the text of the next call: short enough for the segment, and different for different calls."""
        text = name.encode() if tensor is None else self._described(name, tensor)
        announced, self._announced = self._announced, b""
        return (text + _MARK + announced)[:_TEXT_BYTES] if announced else text

    def _described(self, name: str, tensor: torch.Tensor) -> bytes:
        key = (name, tensor.dtype, tensor.shape)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[key] = _shortened(f"{name} of {describe_tensor(tensor)}".encode())
        return known


def is_same_call(one: bytes, other: bytes) -> bool:
    """Return True if two texts describe the same call, whatever messages show of it.

    >>> is_same_call(b"barrier\\0one", b"barrier ")
    True
    """
    return one.partition(_MARK)[0].rstrip() == other.partition(_MARK)[0].rstrip()


def shown_call(text: bytes) -> str:
    """Return what messages show of a call.

    >>> shown_call(b"all_reduce(MAX) of torch.int64 (3,)\\0all_gather(axis=0) of torch.float32 (2,) ")
    'all_gather(axis=0) of torch.float32 (2,)'
    """
    call, _, shown = text.decode(errors="replace").partition(_MARK.decode())
    return (shown or call).strip()


def _shortened(text: bytes) -> bytes:
    digest = hashlib.sha256(text).hexdigest()[:16].encode()
    return text if len(text) <= _TEXT_BYTES else text[: _TEXT_BYTES - len(digest) - 1] + b" " + digest
