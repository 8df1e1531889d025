"""FarmHash's Fingerprint64 and TensorFlow's FingerprintCat64 of one string, as their papers of code have them."""

from __future__ import annotations

_K0, _K1, _K2 = 0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F
_MASK = 2**64 - 1


def _word(text: bytes, at: int, size: int = 8) -> int:
    return int.from_bytes(text[at : at + size], "little")


def _mix(value: int) -> int:
    return value ^ (value >> 47)


def _rotate(value: int, bits: int) -> int:
    value &= _MASK
    return (value >> bits | value << (64 - bits)) & _MASK


def _join(u: int, v: int, mul: int) -> int:
    a = _mix(((u ^ v) * mul) & _MASK)
    return (_mix(((v ^ a) * mul) & _MASK) * mul) & _MASK


def fingerprint64(text: bytes) -> int:
    """For strings of at most 64 bytes."""
    length = len(text)
    mul = _K2 + 2 * length & _MASK
    assert length <= 64
    if length == 0:
        return _K2
    if length < 4:
        y, z = text[0] + (text[length >> 1] << 8), length + (text[-1] << 2)
        return _mix((y * _K2 & _MASK) ^ (z * _K0 & _MASK)) * _K2 & _MASK
    if length < 8:
        return _join(length + (_word(text, 0, 4) << 3), _word(text, length - 4, 4), mul)
    if length <= 16:
        a, b = _word(text, 0) + _K2 & _MASK, _word(text, length - 8)
        return _join(_rotate(b, 37) * mul + a & _MASK, (_rotate(a, 25) + b) * mul & _MASK, mul)
    a, b = _word(text, 0) * (_K1 if length <= 32 else _K2) & _MASK, _word(text, 8)
    c, d = _word(text, length - 8) * mul & _MASK, _word(text, length - 16) * _K2 & _MASK
    y = _rotate(a + b, 43) + _rotate(c, 30) + d & _MASK
    z = _join(y, a + _rotate(b + _K2, 18) + c & _MASK, mul)
    if length <= 32:
        return z
    e, f = _word(text, 16) * mul & _MASK, _word(text, 24)
    g, h = (y + _word(text, length - 32)) * mul & _MASK, (z + _word(text, length - 24)) * mul & _MASK
    return _join(_rotate(e + f, 43) + _rotate(g, 30) + h & _MASK, e + _rotate(f + a, 18) + g & _MASK, mul)


def cross(*fingerprints: int) -> int:
    """The hash of a combination of values, from TensorFlow's key on."""
    mul, result = 0xC6A4A7935BD1E995, 0xDECAFCAFFE
    for each in fingerprints:
        result ^= mul ^ (_mix(each * mul & _MASK) * mul & _MASK)
        result = _mix(_mix(result * mul & _MASK) * mul & _MASK)
    return result
