"""Parquet files: footers, and row groups as record batches. Page checksums are verified where they exist.

`parse_footer` checks the metadata of columns and their statistics before Arrow reads them. Arrow checks a column's
metadata on first access, with uncaught exceptions, so a contradictory footer crashes the process. A footer is parsed
once per process, in about 25 us per column of a row group. The parser of Thrift's compact protocol is safe: allocation
and nesting are bounded by the data.

Source: apache/parquet-format, `src/main/thrift/parquet.thrift`; Apache Thrift, `doc/specs/thrift-compact-protocol.md`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import pyarrow as pa

from raydist.pipelines.elements.arrow_types import read_names
from raydist.pipelines.formats.arrow_file import arrow_errors, as_arrow_file
from raydist.pipelines.formats.files import OpenFile, open_file, read_range

ThriftStruct: TypeAlias = dict[int, Any]
"""Values by field number: bool, int, bytes, lists and structs; None for other types, which are skipped."""

# Of Thrift's compact protocol.
_MAX_DEPTH = 24  # of nested structs and lists; Parquet's footers have 7
_MAX_SHIFT = 63
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT, _UUID = 1, 2, 3, 7, 8, 9, 10, 11, 12, 13
_FIRST_INT, _LAST_INT = 4, 6  # of 16, 32 and 64 bits
_PASSED_BYTES = {_BYTE: 1, _DOUBLE: 8, _UUID: 16}
_REMEMBERED = 256  # footers
_MAX_COLUMN_DEPTH = 100  # of nested columns: Arrow recurses into them
_MIN_VALUE_BYTES = 8
# Field numbers, and values, of Parquet's footers.
_SCHEMA, _ROW_GROUPS = 2, 4
_TYPE, _TYPE_LENGTH, _REPETITION, _NUM_CHILDREN = 1, 2, 3, 5
_COLUMNS, _NUM_ROWS = 1, 3
_META_DATA, _CRYPTO_METADATA = 3, 8
_PATH, _NUM_VALUES, _RAW_SIZE, _STATISTICS, _SIZE_STATISTICS = 3, 5, 6, 12, 16
_EXTREMES = (1, 2, 5, 6)
_TEXT_BYTES, _REPETITION_LEVELS, _DEFINITION_LEVELS = 1, 2, 3
_REQUIRED, _OPTIONAL, _REPEATED = 0, 1, 2
_BYTE_ARRAY, _FIXED_BYTES = 6, 7
_VALUE_BYTES = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8, _BYTE_ARRAY: 0}  # by physical type
_NEEDED: Any = object()
_BATCH_BYTES = 1 << 22
_MAX_BATCH_ROWS = 1 << 16
_BUFFER_BYTES = 1 << 20
_MAGIC = b"PAR1"
_END = struct.Struct("<I4s")  # length of the footer, magic
_TAIL_BYTES = 1 << 16  # read at once: Arrow reads as much, so that a remote file's cache serves Arrow


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


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The number of rows of a row group, and the approximate bytes of each column in memory.

    Equal values take almost no space in the file: each value counts as at least 8 bytes.
    """

    num_rows: int
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A column with values."""

    physical_type: int
    value_bytes: int  # of one value in the statistics; 0 if it varies
    repetition: int  # levels
    definition: int


@lru_cache(_REMEMBERED)
def parse_footer(data: bytes) -> tuple[RowGroup, ...]:
    """Return the row groups of the footer in `data`, which excludes the length and magic bytes after the footer.

    Raises:
        ValueError: The footer is damaged or contradictory.
    """
    fields = read_struct(data)
    leaves = _leaves(_of_type(fields, _SCHEMA, list))
    return tuple(_row_group(group, leaves) for group in _of_type(fields, _ROW_GROUPS, list))


def _leaves(elements: Sequence[Any]) -> list[_Leaf]:
    """Return the columns with values, in order. `elements` is the tree of columns, parents before children."""
    leaves = []
    open_parents: list[tuple[int, int, int]] = [(1, 0, 0)]  # (children to come, repetition, definition)
    for number, element in enumerate(elements):
        while open_parents and not open_parents[-1][0]:
            open_parents.pop()
        if not open_parents or len(open_parents) > _MAX_COLUMN_DEPTH:
            raise ValueError(f"its columns must be one tree, at most {_MAX_COLUMN_DEPTH} deep")
        left, repetition, definition = open_parents[-1]
        open_parents[-1] = left - 1, repetition, definition
        kind = _of_type(element, _REPETITION, int, _REQUIRED)
        if number and kind != _REQUIRED:
            repetition, definition = repetition + (kind == _REPEATED), definition + 1
        num_children = _of_type(element, _NUM_CHILDREN, int, 0)
        if num_children > 0 or not number:
            open_parents.append((num_children, repetition, definition))
        else:
            leaves.append(_leaf(element, repetition, definition))
    if any(left > 0 for left, _, _ in open_parents):
        raise ValueError("columns are missing")
    return leaves


def _leaf(element: ThriftStruct, repetition: int, definition: int) -> _Leaf:
    physical_type = _of_type(element, _TYPE, int)
    if physical_type == _FIXED_BYTES:
        return _Leaf(physical_type, _of_type(element, _TYPE_LENGTH, int), repetition, definition)
    if physical_type not in _VALUE_BYTES:
        raise ValueError(f"a column has the unknown type {physical_type}")
    return _Leaf(physical_type, _VALUE_BYTES[physical_type], repetition, definition)


def _row_group(group: Any, leaves: Sequence[_Leaf]) -> RowGroup:
    columns = _of_type(group, _COLUMNS, list)
    num_rows = _of_type(group, _NUM_ROWS, int)
    if len(columns) != len(leaves) or num_rows < 0:
        raise ValueError(f"a row group has {num_rows} rows and {len(columns)} columns, the file has {len(leaves)}")
    sizes: dict[str, int] = {}
    for column, leaf in zip(columns, leaves, strict=True):
        if _of_type(column, _CRYPTO_METADATA, dict, None) is not None:
            raise ValueError("it has encrypted columns, which raydist does not read")
        chunk = _of_type(column, _META_DATA, dict)
        name = _name(chunk)
        values = _of_type(chunk, _NUM_VALUES, int)
        raw_size = _of_type(chunk, _RAW_SIZE, int)
        sizes[name] = sizes.get(name, 0) + max(raw_size, _MIN_VALUE_BYTES * values)
        _check_column(chunk, leaf)
    return RowGroup(num_rows, sizes)


def _name(chunk: ThriftStruct) -> str:
    path = _of_type(chunk, _PATH, list)
    if not path or not isinstance(path[0], bytes):
        raise ValueError("a column has no name")
    return path[0].decode()


def _check_column(chunk: ThriftStruct, leaf: _Leaf) -> None:
    """Raise ValueError where Arrow would crash the process."""
    found = _of_type(chunk, _TYPE, int)
    if found != leaf.physical_type:
        raise ValueError(f"a column has the type {leaf.physical_type}, but in a row group the type {found}")
    levels = _of_type(chunk, _SIZE_STATISTICS, dict, {})
    for number, most in ((_REPETITION_LEVELS, leaf.repetition), (_DEFINITION_LEVELS, leaf.definition)):
        size = len(_of_type(levels, number, list, ()))
        if size not in (0, most + 1):
            raise ValueError(f"a column has {most + 1} levels, but counts of {size}")
    if _TEXT_BYTES in levels and leaf.physical_type != _BYTE_ARRAY:
        raise ValueError(f"a column of type {leaf.physical_type} has a size of its texts")
    statistics = _of_type(chunk, _STATISTICS, dict, {})
    for number in _EXTREMES:
        size = len(_of_type(statistics, number, bytes, b""))
        if 0 < size < leaf.value_bytes:
            raise ValueError(f"a column's least or largest value has {size} bytes, not {leaf.value_bytes}")


def _of_type(struct: Any, number: int, kind: type, default: Any = _NEEDED) -> Any:
    value = struct.get(number, default) if isinstance(struct, dict) else None
    if value is default and default is not _NEEDED:
        return default
    if not isinstance(value, kind):
        raise ValueError(
            f"it has {'nothing' if value is _NEEDED else repr(value)[:40]} where a {kind.__name__} must be"
        )
    return value


class ParquetFile:
    """An open file.

    Attributes:
        path: Path as given.
        schema: Schema of all columns.
        num_rows: Number of rows in the footer.
        num_row_groups: Number of row groups in the footer.
    """

    def __init__(self, path: str) -> None:
        """Open the file and read its footer. Raises like `open_file`, and DataLossError."""
        import pyarrow.dataset as arrow_dataset  # takes 80 ms, needed only for Parquet files

        self.path = path
        opened = open_file(path)
        self._file = opened.file
        self._arrow: Any = None
        self._fragment: Any = None
        options = arrow_dataset.ParquetFragmentScanOptions(
            page_checksum_verification=True, use_buffered_stream=True, buffer_size=_BUFFER_BYTES, pre_buffer=False
        )
        try:
            with parquet_errors(path, opened.size):
                self._arrow = as_arrow_file(opened.file)
                self._row_groups = read_footer(opened)
                kind = arrow_dataset.ParquetFileFormat(default_fragment_scan_options=options)
                self._fragment = kind.make_fragment(self._arrow)
                self.schema: pa.Schema = self._fragment.physical_schema
                read_names(self.schema)
                self.num_rows = sum(group.num_rows for group in self._row_groups)
                self.num_row_groups: int = self._fragment.metadata.num_row_groups
                if self.num_row_groups != len(self._row_groups):
                    raise ValueError(f"Arrow finds {self.num_row_groups} row groups in it")
        except BaseException:
            self.close()
            raise

    def check(self, columns: list[str], row_filter: Any) -> None:
        """Raise Arrow's error if the filter does not fit the columns. Reads nothing."""
        self._fragment.scanner(columns=columns, filter=row_filter, schema=self.schema)

    def batches(self, row_group: int, columns: list[str], row_filter: Any) -> Iterator[pa.RecordBatch]:
        """Return the filtered rows of one row group; does not read it if its statistics rule it out.

        The boundaries of batches depend on the file alone. Nothing is read ahead.
        """
        part = self._fragment.subset(row_group_ids=[row_group])
        if row_filter is not None and not part.split_by_row_group(row_filter, schema=self.schema):
            return iter(())
        scanner = part.scanner(
            schema=self.schema,
            columns=columns,
            filter=row_filter,
            batch_size=self._batch_rows(row_group),
            batch_readahead=1,
            use_threads=False,  # elements come in order, and raydist manages threads
        )
        batches: Iterator[pa.RecordBatch] = scanner.to_batches()
        return batches

    def row_group_size(self, row_group: int, columns: list[str]) -> tuple[int, int]:
        """Return the rows of a row group, and the approximate bytes of some of its columns in memory."""
        group = self._row_groups[row_group]
        return group.num_rows, sum(group.sizes.get(name, 0) for name in columns)

    def _batch_rows(self, row_group: int) -> int:
        group = self._fragment.metadata.row_group(row_group)
        row_bytes: int = max(1, group.total_byte_size // max(1, group.num_rows))
        return max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES // row_bytes))

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._arrow is not None:
            self._arrow.close()
        self._arrow = self._fragment = None
        self._file.close()


def read_footer(opened: OpenFile) -> tuple[RowGroup, ...]:
    """Return the row groups of a file; raises ValueError if it is damaged, or would crash Arrow."""
    size: int = as_arrow_file(opened.file).size() if opened.size is None else opened.size
    tail = read_range(opened.file, max(0, size - _TAIL_BYTES), min(size, _TAIL_BYTES))
    if len(tail) < _END.size:
        raise ValueError(f"it has only {len(tail)} bytes")
    length, magic = _END.unpack_from(tail, len(tail) - _END.size)
    if magic != _MAGIC:
        raise ValueError(f"it must end with {_MAGIC!r}, got {magic!r}")
    if length + _END.size > size:
        raise ValueError(f"its footer must have {length} bytes, but it has {size} in all")
    if length + _END.size > len(tail):
        tail = read_range(opened.file, size - _END.size - length, length + _END.size)
    return parse_footer(tail[-_END.size - length : -_END.size])


def parquet_errors(path: str, offset: int | None) -> AbstractContextManager[None]:
    """Return a context that turns Arrow's errors about damage at `offset` into a DataLossError."""
    return arrow_errors(path, offset, "it", "Parquet")
