"""The fingerprints by which TensorFlow numbers strings and crosses of features, on whole arrays.

`fingerprint64` is `Fingerprint64` of Google's FarmHash, `fingerprint_cat64` is `FingerprintCat64` of TensorFlow.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

Hashes = np.ndarray[Any, np.dtype[np.uint64]]
_Numbers = np.ndarray[Any, np.dtype[np.int64]]

_K0, _K1, _K2 = np.uint64(0xC3A5C85C97CB3127), np.uint64(0xB492B66FBE98F273), np.uint64(0x9AE16A3B2F90404F)
_CAT = np.uint64(0xC6A4A7935BD1E995)
_SEED = np.uint64(81)
_2, _3, _8, _47, _113 = map(np.uint64, (2, 3, 8, 47, 113))
_WORD = 8


def fingerprint64(texts: pa.LargeBinaryArray) -> Hashes:
    """Return the Fingerprint64 of each string.

    >>> fingerprint64(pa.array([b"a", b""], pa.large_binary())).tolist()
    [12917804110809363939, 11160318154034397263]
    """
    _, offset_buffer, data = texts.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    readable = np.zeros(int(offsets[-1]) + _WORD if len(texts) else _WORD, np.uint8)
    if data is not None:
        readable[:-_WORD] = np.frombuffer(data, np.uint8)[: len(readable) - _WORD]
    starts, lengths = offsets[:-1], np.diff(offsets)
    hashes = np.empty(len(texts), np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(readable, _WORD)
    # The formula depends on the length; that of long strings goes through blocks of 64 bytes.
    kinds = np.searchsorted(_LONGEST, lengths) + np.maximum(lengths - 1, 0) // 64
    for kind in np.unique(kinds).tolist():
        chosen = np.flatnonzero(kinds == kind)
        text = _Strings(windows, starts[chosen], lengths[chosen])
        hashes[chosen] = _FORMULAS[kind](text) if kind < len(_FORMULAS) else _hash_long(text)
    return hashes


def fingerprint_cat64(first: Hashes, second: Hashes) -> Hashes:
    """Return the FingerprintCat64 of pairs of fingerprints.

    >>> fingerprint_cat64(np.array([1], np.uint64), np.array([2], np.uint64)).tolist()
    [14454907135238785252]
    """
    return _mix(_mix((first ^ _CAT ^ (_mix(second * _CAT) * _CAT)) * _CAT) * _CAT)


class _Strings(NamedTuple):
    """Strings in one buffer. For each byte `windows` has the 8 bytes from there on."""

    windows: np.ndarray[Any, np.dtype[np.uint8]]
    starts: _Numbers
    lengths: _Numbers

    def word(self, at: Any) -> Hashes:
        """Return 8 bytes from a position of each string on as little-endian integers."""
        words: Hashes = self.windows[self.starts + at].view("<u8")[:, 0]
        return words

    def half(self, at: Any) -> Hashes:
        return self.word(at) & np.uint64(0xFFFFFFFF)

    def byte(self, at: Any) -> Hashes:
        return self.word(at) & np.uint64(0xFF)

    @property
    def size(self) -> Hashes:
        return self.lengths.astype(np.uint64)

    @property
    def factor(self) -> Hashes:
        return _K2 + self.size * _2


def _mix(values: Hashes) -> Hashes:
    return values ^ (values >> _47)


def _rotate(values: Hashes, bits: int) -> Hashes:
    return (values >> np.uint64(bits)) | (values << np.uint64(64 - bits))


def _join(first: Hashes, second: Hashes, factor: Hashes) -> Hashes:
    return _mix((second ^ _mix((first ^ second) * factor)) * factor) * factor


def _hash0(text: _Strings) -> Hashes:
    return np.full(len(text.starts), _K2)


def _hash1to3(text: _Strings) -> Hashes:
    y = text.byte(0) + (text.byte(text.lengths >> 1) << _8)
    z = text.size + (text.byte(text.lengths - 1) << _2)
    return _mix((y * _K2) ^ (z * _K0)) * _K2


def _hash4to7(text: _Strings) -> Hashes:
    return _join(text.size + (text.half(0) << _3), text.half(text.lengths - 4), text.factor)


def _hash8to16(text: _Strings) -> Hashes:
    a, b, factor = text.word(0) + _K2, text.word(text.lengths - 8), text.factor
    return _join(_rotate(b, 37) * factor + a, (_rotate(a, 25) + b) * factor, factor)


def _ends(text: _Strings, a: Hashes) -> tuple[Hashes, Hashes]:
    b, c, d = text.word(8), text.word(text.lengths - 8) * text.factor, text.word(text.lengths - 16) * _K2
    return _rotate(a + b, 43) + _rotate(c, 30) + d, a + _rotate(b + _K2, 18) + c


def _hash17to32(text: _Strings) -> Hashes:
    return _join(*_ends(text, text.word(0) * _K1), text.factor)


def _hash33to64(text: _Strings) -> Hashes:
    a, factor = text.word(0) * _K2, text.factor
    y, other = _ends(text, a)
    z = _join(y, other, factor)
    e, f = text.word(16) * factor, text.word(24)
    g, h = (y + text.word(text.lengths - 32)) * factor, (z + text.word(text.lengths - 24)) * factor
    return _join(_rotate(e + f, 43) + _rotate(g, 30) + h, e + _rotate(f + a, 18) + g, factor)


_Pair = tuple[Hashes, Hashes]
_State = tuple[Hashes, Hashes, Hashes, _Pair, _Pair]


def _hash_long(text: _Strings) -> Hashes:
    """Return the hashes of strings of more than 64 bytes that have the same number of blocks."""
    zero = np.zeros(len(text.starts), np.uint64)
    y = (zero + _SEED) * _K1 + _113
    state = ((zero + _SEED) * _K2 + text.word(0), y, _mix(y * _K2 + _113) * _K2, (zero, zero), (zero, zero))
    for at in range(0, int(text.lengths[0] - 1) // 64 * 64, 64):
        state = _hash_block(text, at, state, zero + _K1, np.uint64(1))
    x, y, z, v, w = state
    factor = _K1 + ((z & np.uint64(0xFF)) << np.uint64(1))
    w0 = w[0] + ((text.size - np.uint64(1)) & np.uint64(63))
    v0 = v[0] + w0
    state = (x, y, z, (v0, v[1]), (w0 + v0, w[1]))
    x, y, z, v, w = _hash_block(text, text.lengths - 64, state, factor, np.uint64(9))
    return _join(_join(v[0], w[0], factor) + _mix(y) * _K0 + z, _join(v[1], w[1], factor) + x, factor)


def _hash_block(text: _Strings, at: Any, state: _State, factor: Hashes, weight: np.uint64) -> _State:
    x, y, z, v, w = state
    x = _rotate(x + y + v[0] + text.word(at + 8), 37) * factor ^ (w[1] * weight)
    y = _rotate(y + v[1] + text.word(at + 48), 42) * factor + v[0] * weight + text.word(at + 40)
    z = _rotate(z + w[0], 33) * factor
    v = _hash32(text, at, v[1] * factor, x + w[0])
    return z, y, x, v, _hash32(text, at + 32, z + w[1], y + text.word(at + 16))


def _hash32(text: _Strings, at: Any, a: Hashes, b: Hashes) -> _Pair:
    w, x, y, z = (text.word(at + offset) for offset in (0, 8, 16, 24))
    first = a + w
    second = _rotate(b + first + z, 21)
    total = first + x + y
    return total + z, second + _rotate(total, 44) + first


_LONGEST = np.array([0, 3, 7, 16, 32])
_FORMULAS = (_hash0, _hash1to3, _hash4to7, _hash8to16, _hash17to32, _hash33to64)
