"""Footers of Parquet files, checked before Arrow sees them: some that contradict themselves end its process.

Arrow checks a column's metadata when it is first asked for, by exceptions that nobody catches. What it checks there is
checked here first. A footer is parsed once a process, at about 25 us for a column of a row group.

Source: apache/parquet-format, `src/main/thrift/parquet.thrift`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, final

from raydist.pipelines.formats.thrift_compact import ThriftStruct, read_struct

__all__ = ["ParquetFooter", "RowGroup", "parse_footer"]

_REMEMBERED = 256  # footers
_MAX_DEPTH = 100  # of columns in columns: Arrow goes down them by recursion
_MIN_VALUE_BYTES = 8

# Fields, by the numbers that the format gives them.
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


@final
@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group.

    Attributes:
        num_rows: In it.
        sizes: About how many bytes each column takes in memory. One of equal values takes next to nothing in the file:
            each value counts for 8 bytes at least.
    """

    num_rows: int
    sizes: Mapping[str, int]


@final
@dataclass(frozen=True, slots=True)
class ParquetFooter:
    """What a footer says of the row groups."""

    row_groups: tuple[RowGroup, ...]


@final
@dataclass(frozen=True, slots=True)
class _Leaf:
    """A column that holds values."""

    physical_type: int
    value_bytes: int  # of one value in the statistics; 0 where that varies
    repetition: int  # levels
    definition: int


@lru_cache(_REMEMBERED)
def parse_footer(data: bytes) -> ParquetFooter:
    """The footer in `data`, without the length and the magic bytes behind it.

    Raises:
        ValueError: It is damaged or contradicts itself.
    """
    fields = read_struct(data)
    leaves = _leaves(_of_type(fields, _SCHEMA, list))
    return ParquetFooter(tuple(_row_group(group, leaves) for group in _of_type(fields, _ROW_GROUPS, list)))


def _leaves(elements: Sequence[Any]) -> list[_Leaf]:
    """The columns with values, in order. `elements` is the tree of columns, parents before children."""
    leaves = []
    open_parents: list[tuple[int, int, int]] = [(1, 0, 0)]  # (children to come, repetition, definition)
    for number, element in enumerate(elements):
        while open_parents and not open_parents[-1][0]:
            open_parents.pop()
        if not open_parents or len(open_parents) > _MAX_DEPTH:
            raise ValueError(f"its columns must be one tree, at most {_MAX_DEPTH} deep")
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
    """Raise ValueError where Arrow would end the process."""
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


_NEEDED: Any = object()


def _of_type(struct: Any, number: int, kind: type, default: Any = _NEEDED) -> Any:
    value = struct.get(number, default) if isinstance(struct, dict) else None
    if value is default and default is not _NEEDED:
        return default
    if not isinstance(value, kind):
        raise ValueError(
            f"it has {'nothing' if value is _NEEDED else repr(value)[:40]} where a {kind.__name__} must be"
        )
    return value
