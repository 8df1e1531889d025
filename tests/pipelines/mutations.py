"""Damage to files, drawn at random but the same every time."""

from __future__ import annotations

import random

__all__ = ["cuts", "mutations"]


def mutations(content: bytes, count: int, seed: int = 3) -> list[tuple[str, bytes]]:
    """`count` damaged copies with a word on the damage: bit flips, truncations, zeroed runs and garbage appended."""
    draw = random.Random(seed)
    kinds = (_flip, _truncate, _zero, _append)
    return [kinds[number % len(kinds)](content, draw) for number in range(count)]


def cuts(content: bytes, count: int) -> list[tuple[str, bytes]]:
    """About `count` copies that end too early, evenly spread: the empty one, and one that lacks its last byte."""
    sizes = {*range(0, len(content), max(1, len(content) // count)), len(content) - 1}
    return [(f"cut to {size} bytes", content[:size]) for size in sorted(sizes) if size >= 0]


def _flip(content: bytes, draw: random.Random) -> tuple[str, bytes]:
    at, bit = draw.randrange(len(content)), draw.randrange(8)
    return f"bit {bit} of byte {at}", content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


def _truncate(content: bytes, draw: random.Random) -> tuple[str, bytes]:
    size = draw.randrange(len(content))
    return f"cut to {size} bytes", content[:size]


def _zero(content: bytes, draw: random.Random) -> tuple[str, bytes]:
    start, size = draw.randrange(len(content)), draw.randrange(1, 40)
    end = min(len(content), start + size)
    return f"zeros from {start} to {end}", content[:start] + bytes(end - start) + content[end:]


def _append(content: bytes, draw: random.Random) -> tuple[str, bytes]:
    garbage = draw.randbytes(draw.randrange(1, 40))
    return f"{len(garbage)} bytes of garbage behind the end", content + garbage
