"""What a rank calls, as text that the others compare."""

from __future__ import annotations

import hashlib
from typing import final

import torch

from raydist.collectives.parts import describe_tensor
from raydist.collectives.shared_memory.layout import CALL_BYTES

__all__ = ["MARK", "CallTexts", "is_noted", "is_same_call", "shown_call"]

_TEXT_BYTES = CALL_BYTES - 8
_MOST_KNOWN = 1024
MARK = b"\0"
"""Behind it stands what is not compared: what is shown, and behind another one whether it is marked."""
_NOTE = b"!"


@final
class CallTexts:
    """The texts of calls, each made once: a program repeats a few."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, torch.dtype, torch.Size], bytes] = {}
        self._announced, self._noting = "", False

    def announce(self, what: str) -> None:
        """Show this of the next call."""
        self._announced = what

    def note(self) -> None:
        """Mark the next call."""
        self._noting = True

    def next_call(self, name: str, tensor: torch.Tensor | None) -> bytes:
        """The text of the next call, with what was said of it."""
        text = b"" if tensor is None else self._known.get((name, tensor.dtype, tensor.shape), b"")
        text = text or self.text(name, tensor)
        if self._announced or self._noting:
            text = self.with_remarks(text, self._announced, noted=self._noting)
            self._announced, self._noting = "", False
        return text

    def text(self, name: str, tensor: torch.Tensor | None) -> bytes:
        """What is called, on what: at most as much as a slot has room for, and different for different calls."""
        if tensor is None:
            return name.encode()
        key = (name, tensor.dtype, tensor.shape)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[key] = _shorten(f"{name} of {describe_tensor(tensor)}".encode())
        return known

    def with_remarks(self, text: bytes, shown: str, *, noted: bool) -> bytes:
        """A text with what is not compared: what messages show in its place, and whether the call is marked."""
        most = _TEXT_BYTES - len(text) - 2 * len(MARK) - len(_NOTE)
        shown_bytes = shown.encode()[: max(most, 0)]
        return _shorten(text + MARK + shown_bytes + MARK + (_NOTE if noted else b""))


def is_same_call(one: bytes, other: bytes) -> bool:
    """Whether two texts are of the same call, whatever they remark."""
    return one.partition(MARK)[0].rstrip() == other.partition(MARK)[0].rstrip()


def is_noted(text: bytes) -> bool:
    """Whether the call is marked."""
    return text.rstrip().endswith(MARK + _NOTE)


def shown_call(text: bytes) -> str:
    """What messages say of a call.

    >>> shown_call(b"all_reduce(MAX) of torch.int64 (3,)\\0all_gather(axis=0) of torch.float32 (2,)\\0  ")
    'all_gather(axis=0) of torch.float32 (2,)'
    """
    call, *remarks = text.decode(errors="replace").split(MARK.decode())
    return ((remarks[0] if remarks else "") or call).strip()


def _shorten(text: bytes) -> bytes:
    digest = hashlib.sha256(text).hexdigest()[:16].encode()
    return text if len(text) <= _TEXT_BYTES else text[: _TEXT_BYTES - len(digest) - 1] + b" " + digest
