"""A bit mixer: integers that look random and are functions of other integers."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Words", "scramble"]

Words = np.ndarray[Any, np.dtype[np.uint64]]

_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_STEP = np.uint64(0x9E3779B97F4A7C15)


def scramble(words: Words) -> Words:
    """Return words of which every bit depends on every bit of the input: one step of SplitMix64, which is one to one.

    >>> [hex(word) for word in scramble(np.array([0, 1], np.uint64))]
    ['0xe220a8397b1dcdaf', '0x910a2dec89025cc1']
    """
    mixed: Words = words + _STEP
    held = np.empty_like(mixed)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        np.right_shift(mixed, np.uint64(shift), out=held)
        np.bitwise_xor(mixed, held, out=mixed)
        np.multiply(mixed, factor, out=mixed)
    np.right_shift(mixed, np.uint64(31), out=held)
    np.bitwise_xor(mixed, held, out=mixed)
    return mixed
