"""A safe parser of structs in Thrift's compact protocol: allocation and nesting are bounded by the data.

Source: Apache Thrift, `doc/specs/thrift-compact-protocol.md`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["ThriftStruct", "read_struct"]

ThriftStruct: TypeAlias = dict[int, Any]
"""Values by field number: bool, int, bytes, lists and structs; None for other types, which are skipped."""

_MAX_DEPTH = 24  # of nested structs and lists; Parquet's footers have 7
_MAX_SHIFT = 63

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT, _UUID = 1, 2, 3, 7, 8, 9, 10, 11, 12, 13
_FIRST_INT, _LAST_INT = 4, 6  # of 16, 32 and 64 bits
_PASSED_BYTES = {_BYTE: 1, _DOUBLE: 8, _UUID: 16}


def read_struct(data: bytes) -> ThriftStruct:
    """Return the struct at the beginning of `data`.

    >>> read_struct(bytes([0x15, 0x02, 0x18, 0x01, 0x61, 0x00]))
    {1: 1, 2: b'a'}

    Raises:
        ValueError: The data is no such struct, or has a field twice.
    """
    try:
        return _struct(data, 0, 0)[0]
    except IndexError:
        raise ValueError("it ends too early") from None


# Each function takes the start of a value, and returns the value and its end. Most numbers are one byte, read inline.


def _struct(data: bytes, at: int, depth: int) -> tuple[ThriftStruct, int]:
    if depth > _MAX_DEPTH:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
    fields: ThriftStruct = {}
    number = 0
    while head := data[at]:
        at += 1
        kind = head & 0xF
        if head > 0xF:
            number += head >> 4
        else:
            number, at = _integer(data, at)
        if number in fields:
            raise ValueError(f"a struct has field {number} twice")
        if _FIRST_INT <= kind <= _LAST_INT:
            value, at = (data[at], at + 1) if data[at] <= 0x7F else _varint(data, at)
            fields[number] = (value >> 1) ^ -(value & 1)
        elif kind in (_TRUE, _FALSE):
            fields[number] = kind == _TRUE
        else:
            fields[number], at = _value(data, at, kind, depth + 1)
    return fields, at + 1


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind == _BINARY:
        size, at = _size(data, at)
        return data[at : at + size], at + size
    if _FIRST_INT <= kind <= _LAST_INT:
        return _integer(data, at)
    if kind == _STRUCT:
        return _struct(data, at, depth)
    if kind in (_LIST, _SET):
        return _list(data, at, depth)
    if kind == _MAP:
        return _map(data, at, depth)
    if kind in _PASSED_BYTES:
        return None, at + _PASSED_BYTES[kind]
    raise ValueError(f"it has a value of the unknown kind {kind}")


def _list(data: bytes, at: int, depth: int) -> tuple[list[Any], int]:
    if depth > _MAX_DEPTH:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
    kind, size = data[at] & 0xF, data[at] >> 4
    at += 1
    if size == 0xF:
        size, at = _size(data, at)  # each value takes at least a byte
    kind = _BYTE if kind in (_TRUE, _FALSE) else kind  # in a list, a bool is a byte
    values = []
    for _ in range(size):
        value, at = _value(data, at, kind, depth + 1)
        values.append(value)
    return values, at


def _map(data: bytes, at: int, depth: int) -> tuple[None, int]:
    size, at = _size(data, at)
    kinds = data[at] if size else 0
    at += 1 if size else 0
    for kind in (kinds >> 4, kinds & 0xF) * size:
        _, at = _value(data, at, _BYTE if kind in (_TRUE, _FALSE) else kind, depth + 1)
    return None, at


def _size(data: bytes, at: int) -> tuple[int, int]:
    size, at = _varint(data, at)
    if size > len(data) - at:
        raise ValueError(f"it has a part of {size} bytes, but only {len(data) - at} are left")
    return size, at


def _integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte <= 0x7F:
            return value, at
        shift += 7
        if shift > _MAX_SHIFT:
            raise ValueError("a number has more than 64 bits")
