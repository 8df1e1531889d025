"""Damage to content: copy `number` of a content is the same in every process."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

__all__ = ["Mutant", "mutant", "tampered"]

_ODD_BYTES = (0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF)
_EDGE = 512  # headers and footers, where half of the damage goes


@final
@dataclass(frozen=True)
class Mutant:
    """A damaged copy.

    Attributes:
        content: Of the copy.
        start: The first byte that may differ from the original.
        end: The byte behind the last one; None where all that follows has moved or gone.
        what: The damage in words.
    """

    content: bytes
    start: int
    end: int | None
    what: str


def mutant(content: bytes, number: int) -> Mutant:
    """Copy `number`."""
    draw = random.Random(f"mutant {number}")
    return draw.choice(_KINDS)(content, _place(len(content), draw), draw)


def _place(size: int, draw: random.Random) -> int:
    near = draw.randrange(min(_EDGE, size))
    return draw.choice((near, size - 1 - near, draw.randrange(size), draw.randrange(size)))


def _over(content: bytes, at: int, new: bytes, what: str) -> Mutant:
    end = min(len(content), at + len(new))
    return Mutant(content[:at] + new[: end - at] + content[end:], at, end, f"{what} at {at}")


def _flip(content: bytes, at: int, draw: random.Random) -> Mutant:
    bit = draw.randrange(8)
    return _over(content, at, bytes([content[at] ^ 1 << bit]), f"bit {bit} flipped")


def _odd(content: bytes, at: int, draw: random.Random) -> Mutant:
    value = draw.choice(_ODD_BYTES)
    return _over(content, at, bytes([value]), f"byte {value}")


def _noise(content: bytes, at: int, draw: random.Random) -> Mutant:
    size = draw.randrange(1, 40)
    return _over(content, at, draw.randbytes(size), f"{size} random bytes")


def _run(content: bytes, at: int, draw: random.Random) -> Mutant:
    size, value = draw.randrange(1, 40), draw.choice((0, 0xFF))
    return _over(content, at, bytes([value]) * size, f"{size} bytes {value}")


def _truncate(content: bytes, at: int, draw: random.Random) -> Mutant:
    return Mutant(content[:at], at, None, f"cut to {at} bytes")


def _insert(content: bytes, at: int, draw: random.Random) -> Mutant:
    new = draw.randbytes(draw.randrange(1, 9))
    return Mutant(content[:at] + new + content[at:], at, None, f"{len(new)} bytes put in at {at}")


def _remove(content: bytes, at: int, draw: random.Random) -> Mutant:
    size = draw.randrange(1, 9)
    return Mutant(content[:at] + content[at + size :], at, None, f"{size} bytes taken out at {at}")


def _double(content: bytes, at: int, draw: random.Random) -> Mutant:
    end = min(len(content), at + draw.randrange(1, 200))
    return Mutant(content[:end] + content[at:], end, None, f"bytes {at} to {end} doubled")


def _append(content: bytes, at: int, draw: random.Random) -> Mutant:
    size = draw.randrange(1, 40)
    return Mutant(content + draw.randbytes(size), len(content), None, f"{size} bytes of garbage behind the end")


_Damage = Callable[[bytes, int, random.Random], Mutant]
_KINDS: tuple[_Damage, ...] = (_flip, _flip, _odd, _odd, _noise, _run, _truncate, _insert, _remove, _double, _append)

_ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 7, 1 << 31, 1 << 63, 1 << 70, -(1 << 40), 0.5, float("nan"), float("inf"), "", "x", "1"),
    *([], {}, [1], [None], {"at": {}}, {"skip": 1}, [[]], [{}], "9" * 5000),
)


def tampered(state: Any, number: int) -> tuple[Any, str]:
    """Copy `number` of a JSON value with one to three entries changed, taken out, added, swapped or doubled."""
    draw = random.Random(f"tampered {number}")
    words = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = list(_places(state, ()))
        if not places:
            break
        path = draw.choice(places)
        state, word = _tamper(state, path, draw)
        words.append(f"{list(path)}: {word}")
    return state, "; ".join(words)


def _places(value: Any, path: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [path] if path else []
    for key, entry in entries:
        found += _places(entry, (*path, key))
    return found


def _tamper(value: Any, path: tuple[Any, ...], draw: random.Random) -> tuple[Any, str]:
    copy = dict(value) if isinstance(value, dict) else list(value)
    key = path[0]
    if len(path) > 1:
        copy[key], word = _tamper(copy[key], path[1:], draw)
        return copy, word
    kind = draw.randrange(5)
    if kind == 0:
        del copy[key]
        return copy, "taken out"
    if kind == 1 and isinstance(copy[key], int):
        copy[key] += draw.choice((-1, 1, 2, 100))
        return copy, f"{copy[key]}"
    if kind == 2:
        odd = copy[draw.choice(list(copy))] if isinstance(copy, dict) else draw.choice(copy)
    else:
        odd = draw.choice(_ODD_VALUES)
    copy[key] = odd
    return copy, f"{odd!r:.60}"
