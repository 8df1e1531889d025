"""Vectorised parsing of the records of a batch that have the same layout.

Records from one program often agree in everything but their values: the same features in the same order, with the same
numbers of values. Then every value is at the same bytes of every record. The layout of one record is found by a walk
over its fields. One comparison of all other bytes finds the records with the same layout, and one gather reads all
values of a feature.

A layout is strict: a record with anything unusual (a repeated feature, an unknown field, a list in pieces) has none,
and protobuf's parser interprets the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raydist.pipelines.tf_example.outputs import FeatureColumn

MAX_VARINT = 10
"""Largest number of bytes of a 64-bit number."""

_Matrix = np.ndarray[Any, np.dtype[np.uint8]]
_VARINT, _LENGTH, _FIXED32 = 0, 2, 5  # wire types of protobuf
_MIN_RECORDS = 8  # fewer are faster to parse one by one
_MAX_LAYOUTS = 4  # tried per length of records


@dataclass(frozen=True, slots=True)
class Bytes:
    """The positions of values of bytes."""

    spans: tuple[tuple[int, int], ...]  # start and end of each value
    kind = "bytes_list"

    def __len__(self) -> int:
        return len(self.spans)

    def free_bits(self, mask: _Matrix) -> None:
        """Clear the bits of `mask` that may differ between records."""
        for start, end in self.spans:
            mask[start:end] = 0

    def decode(self, records: Sequence[bytes], matrix: _Matrix) -> np.ndarray[Any, Any]:
        """Return the values of all records, shape (records, values)."""
        column = np.empty((len(records), len(self.spans)), dtype=object)
        for number, (start, end) in enumerate(self.spans):
            column[:, number] = [record[start:end] for record in records]
        return column


@dataclass(frozen=True, slots=True)
class Floats:
    """The positions of values of float32."""

    starts: tuple[int, ...]  # first of the four bytes of each value
    kind = "float_list"

    def __len__(self) -> int:
        return len(self.starts)

    def free_bits(self, mask: _Matrix) -> None:
        """Clear the bits of `mask` that may differ between records."""
        for start in self.starts:
            mask[start : start + 4] = 0

    def decode(self, records: Sequence[bytes], matrix: _Matrix) -> np.ndarray[Any, Any]:
        """Return the values of all records, shape (records, values)."""
        if not self.starts:
            return np.empty((len(records), 0), np.float32)
        places = np.add.outer(np.array(self.starts), np.arange(4)).ravel()
        together = places[-1] - places[0] == len(places) - 1
        found = matrix[:, places[0] : places[-1] + 1] if together else matrix[:, places]
        return np.ascontiguousarray(found).view("<f4").astype(np.float32, copy=False)


@dataclass(frozen=True, slots=True)
class Integers:
    """The positions of values of int64, as varints: seven bits per byte; the eighth bit announces another byte."""

    starts: tuple[int, ...]  # first byte of each value
    widths: tuple[int, ...]  # bytes of each value
    kind = "int64_list"

    def __len__(self) -> int:
        return len(self.starts)

    def free_bits(self, mask: _Matrix) -> None:
        """Clear the bits of `mask` that may differ between records: all but the bits that determine the widths."""
        for start, width in zip(self.starts, self.widths, strict=True):
            mask[start : start + width] = 0x80
            if width == MAX_VARINT:
                mask[start + width - 1] = 0xFE  # a 64-bit number uses only one bit of this byte

    def decode(self, records: Sequence[bytes], matrix: _Matrix) -> np.ndarray[Any, Any]:
        """Return the values of all records, shape (records, values)."""
        if max(self.widths, default=1) == 1:
            return matrix[:, list(self.starts)].astype(np.int64)
        widths = np.array(self.widths)
        firsts = np.cumsum(widths) - widths
        within = np.arange(widths.sum()) - np.repeat(firsts, widths)
        found = (matrix[:, np.repeat(self.starts, widths) + within] & 0x7F).astype(np.uint64)
        found <<= (7 * within).astype(np.uint64)
        return np.add.reduceat(found, firsts, axis=1).view(np.int64)


Values = Bytes | Floats | Integers


class _UnusualError(Exception):
    """Raised for a record with an unusual layout."""


class ExampleLayout:
    """The positions of feature values in records of one layout.

    Attributes:
        features: Positions by name, in the order of the record.
    """

    def __init__(self, record: bytes, features: dict[str, Values]) -> None:
        self.features = features
        mask = np.full(len(record), 0xFF, np.uint8)
        for values in features.values():
            values.free_bits(mask)
        self._fixed = np.flatnonzero(mask)
        self._mask = mask[self._fixed]
        self._expected = np.frombuffer(record, np.uint8)[self._fixed] & self._mask

    @classmethod
    def of(cls, record: bytes) -> ExampleLayout | None:
        """Return the layout of `record`; None if it is unusual or no Example."""
        try:
            return cls(record, _walk_example(record))
        except (_UnusualError, IndexError, UnicodeDecodeError):
            return None

    def matches(self, matrix: _Matrix) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return the mask of records (rows of `matrix`, of the layout's length) with this layout."""
        same = (matrix[:, self._fixed] & self._mask) == self._expected
        return np.asarray(same.all(axis=1))


def _walk_example(record: bytes) -> dict[str, Values]:
    """Return the features of Example { Features features = 1; }."""
    if not record:
        raise _UnusualError
    start = _enter(record, 0, len(record), 1)
    features: dict[str, Values] = {}
    while start < len(record):
        start, end = _field(record, start, len(record), 1)
        name, values = _walk_entry(record, start, end)
        if name in features:
            raise _UnusualError
        features[name] = values
        start = end
    return features


def _walk_entry(record: bytes, start: int, end: int) -> tuple[str, Values]:
    """Return the name and values of FeatureEntry { string key = 1; Feature value = 2; }."""
    key_start, key_end = _field(record, start, end, 1)
    at = _enter(record, key_end, end, 2)
    number = record[at] >> 3
    if number not in _WALKS:
        raise _UnusualError
    values = _WALKS[number](record, _enter(record, at, end, number), end)
    return record[key_start:key_end].decode(), values


def _walk_bytes(record: bytes, at: int, end: int) -> Values:
    spans = []
    while at < end:
        start, at = _field(record, at, end, 1)
        spans.append((start, at))
    return Bytes(tuple(spans))


def _walk_floats(record: bytes, at: int, end: int) -> Values:
    if at < end and record[at] == 1 << 3 | _FIXED32:  # not packed: each value with a tag
        starts = range(at + 1, end, 5)
        if (end - at) % 5 or any(record[start - 1] != record[at] for start in starts):
            raise _UnusualError
        return Floats(tuple(starts))
    start = _enter(record, at, end, 1) if at < end else end
    if (end - start) % 4:
        raise _UnusualError
    return Floats(tuple(range(start, end, 4)))


def _walk_integers(record: bytes, at: int, end: int) -> Values:
    tagged = at < end and record[at] == 1 << 3 | _VARINT  # not packed: each value with a tag
    at = at if tagged or at == end else _enter(record, at, end, 1)
    starts, widths = [], []
    while at < end:
        if tagged and record[at] != 1 << 3 | _VARINT:
            raise _UnusualError
        at += tagged
        width = _varint(record, at, end)[1]
        starts.append(at)
        widths.append(width)
        at += width
    return Integers(tuple(starts), tuple(widths))


_WALKS = {1: _walk_bytes, 2: _walk_floats, 3: _walk_integers}  # by the field numbers of BytesList, FloatList, Int64List


def _field(record: bytes, at: int, end: int, number: int) -> tuple[int, int]:
    """Return the start and end of the content of the length-delimited field `number` at `at`."""
    if at >= end or record[at] != number << 3 | _LENGTH:
        raise _UnusualError
    length, width = _varint(record, at + 1, end)
    start = at + 1 + width
    if start + length > end:
        raise _UnusualError
    return start, start + length


def _enter(record: bytes, at: int, end: int, number: int) -> int:
    """Return the start of the content of field `number`, which must extend from `at` to `end`."""
    start, found = _field(record, at, end, number)
    if found != end:
        raise _UnusualError
    return start


def _varint(record: bytes, at: int, end: int) -> tuple[int, int]:
    """Return a number, and its width in bytes."""
    value = 0
    for width in range(1, MAX_VARINT + 1):
        if at + width > end:
            raise _UnusualError
        byte = record[at + width - 1]
        value |= (byte & 0x7F) << 7 * (width - 1)
        if byte < 0x80:
            if width == MAX_VARINT and byte > 1:
                raise _UnusualError
            return value, width
    raise _UnusualError


_Indices = np.ndarray[Any, np.dtype[np.int64]]


def fill_alike(records: Sequence[Any], columns: Sequence[FeatureColumn]) -> list[int]:
    """Fill the rows of records that share a layout with enough others. Return the numbers of other records, in order.

    A record is filled only if it is valid.
    """
    if len(records) < _MIN_RECORDS or set(map(type, records)) != {bytes}:
        return list(range(len(records)))
    lengths = np.fromiter(map(len, records), np.int64, len(records))
    left: list[int] = []
    for length in set(lengths.tolist()):
        left += _fill_one_length(records, np.flatnonzero(lengths == length), columns)
    return sorted(left)


def _fill_one_length(records: Sequence[bytes], rows: _Indices, columns: Sequence[FeatureColumn]) -> list[int]:
    left: list[int] = []
    for _ in range(_MAX_LAYOUTS):
        if len(rows) < _MIN_RECORDS:
            break
        layout = ExampleLayout.of(records[rows[0]])
        wanted = None if layout is None else _wanted(layout, columns)
        if layout is None or wanted is None:
            left.append(int(rows[0]))
            rows = rows[1:]
            continue
        alike = [records[row] for row in rows.tolist()]
        matrix = np.frombuffer(b"".join(alike), np.uint8).reshape(len(rows), -1)
        same = layout.matches(matrix)
        _fill(wanted, alike, matrix, rows, same)
        rows = rows[~same]
    return [*left, *rows.tolist()]


def _wanted(layout: ExampleLayout, columns: Sequence[FeatureColumn]) -> list[tuple[FeatureColumn, Values]] | None:
    """Return the values of each column; None if a column does not accept them."""
    found = [(column, layout.features.get(column.name)) for column in columns]
    wanted = [(column, values) for column, values in found if values is not None]
    fits = all(values.kind == column.kind and column.num_values in (None, len(values)) for column, values in wanted)
    return wanted if fits and len(wanted) == len(columns) else None


def _fill(
    wanted: Sequence[tuple[FeatureColumn, Values]],
    records: list[bytes],
    matrix: np.ndarray[Any, np.dtype[np.uint8]],
    rows: _Indices,
    same: np.ndarray[Any, np.dtype[np.bool_]],
) -> None:
    if not same.all():
        records = [record for record, is_same in zip(records, same.tolist(), strict=True) if is_same]
        matrix, rows = matrix[same], rows[same]
    for column, values in wanted:
        column.fill(rows, values.decode(records, matrix))
