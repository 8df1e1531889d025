"""Damage to content: copy `number` of a content is the same in every process."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, final

__all__ = ["Mutant", "mutant", "tampered"]

_ODD_BYTES = (0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF)
_MOVING = ("cut", "insert", "remove", "double", "append")
_KINDS = ("bit", "bit", "byte", "byte", "noise", "run", *_MOVING)
_EDGE = 512  # headers and footers, where half of the damage goes


@final
@dataclass(frozen=True)
class Mutant:
    """A damaged copy: from `start` to `end` (None: to the end) it may differ from the original."""

    content: bytes
    start: int
    end: int | None
    what: str


def mutant(content: bytes, number: int) -> Mutant:
    draw = random.Random(f"mutant {number}")
    kind, at, size = draw.choice(_KINDS), _place(len(content), draw), draw.randrange(1, 40)
    if kind in _MOVING:
        return _moved(kind, content, len(content) if kind == "append" else at, size, draw)
    new = {
        "bit": bytes([content[at] ^ 1 << draw.randrange(8)]),
        "byte": bytes([draw.choice(_ODD_BYTES)]),
        "noise": draw.randbytes(size),
        "run": bytes([draw.choice((0, 0xFF))]) * size,
    }[kind]
    end = min(len(content), at + len(new))
    return Mutant(content[:at] + new[: end - at] + content[end:], at, end, f"{kind} of {end - at} bytes at {at}")


def _place(size: int, draw: random.Random) -> int:
    near = draw.randrange(min(_EDGE, size))
    return draw.choice((near, size - 1 - near, draw.randrange(size), draw.randrange(size)))


def _moved(kind: str, content: bytes, at: int, size: int, draw: random.Random) -> Mutant:
    end = min(len(content), at + size)
    changed = {
        "cut": content[:at],
        "insert": content[:at] + draw.randbytes(size) + content[at:],
        "remove": content[:at] + content[end:],
        "double": content[:end] + content[at:],
        "append": content + draw.randbytes(size),
    }[kind]
    return Mutant(changed, end if kind == "double" else at, None, f"{kind} of {size} bytes at {at}")


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
