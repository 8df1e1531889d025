"""What a rank calls, as text that the others compare."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import final

import torch

from raydist.collectives.shared_memory.layout import CALL_BYTES
from raydist.errors import InvalidArgumentError

__all__ = ["CallTexts", "check_parts", "describe_tensor"]

_TEXT_BYTES = CALL_BYTES - 8
_MOST_KNOWN = 1024


def describe_tensor(tensor: torch.Tensor) -> str:
    """The dtype and shape.

    >>> describe_tensor(torch.ones(2, 3))
    'torch.float32 (2, 3)'
    """
    return f"{tensor.dtype} {tuple(tensor.shape)}"


@final
class CallTexts:
    """The texts of calls, each made once: a program repeats a few."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, torch.dtype, torch.Size], bytes] = {}

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


def _shorten(text: bytes) -> bytes:
    digest = hashlib.sha256(text).hexdigest()[:16].encode()
    return text if len(text) <= _TEXT_BYTES else text[: _TEXT_BYTES - len(digest) - 1] + b" " + digest


def check_parts(name: str, parts: Sequence[torch.Tensor], one: torch.Tensor, world_size: int) -> None:
    """Raise InvalidArgumentError unless `parts` are one tensor a rank, each like `one`.

    A part that is too short would be written past its end.
    """
    wrong = [describe_tensor(part) for part in parts if part.dtype != one.dtype or part.shape != one.shape]
    if wrong or len(parts) != world_size:
        raise InvalidArgumentError(
            f"{name} needs {world_size} tensors of {describe_tensor(one)}, one a rank, got {len(parts)}"
            f"{f', of which one is {wrong[0]}' if wrong else ''}."
        )
