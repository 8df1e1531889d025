"""Conversion of CSV lines to record batches."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from raydist.pipelines.formats.lines import LineParser

__all__ = ["CsvParser", "header_names", "infer_csv_types"]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@final
@dataclass(frozen=True)
class CsvParser(LineParser):
    """A parser of lines with one row each.

    Attributes:
        schema: Columns to keep, with their types.
        names: All columns of the file, in order.
        has_header: True if the first line of a file has the names.
        delimiter: One character.
        defaults: Values for empty fields.
    """

    what: ClassVar[str] = "one row of the CSV columns"
    schema: pa.Schema
    names: tuple[str, ...]
    has_header: bool = True
    delimiter: str = ","
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def parse(self, lines: Sequence[bytes]) -> pa.RecordBatch:
        table = _read(lines, self.names, self.delimiter, self.schema)
        columns = [self._filled(name, table.column(name)) for name in self.schema.names]
        return pa.table(columns, schema=self.schema).combine_chunks().to_batches()[0]

    def _filled(self, name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
        if name not in self.defaults:
            return column
        default = pa.scalar(self.defaults[name], column.type)
        empty = pc.equal(pc.binary_length(column), 0) if _is_text(column.type) else pc.is_null(column)
        return pc.if_else(empty, default, column)

    def check_header(self, line: bytes) -> str | None:
        found = header_names(line, self.delimiter)
        return None if found == self.names else f"must have the names {list(self.names)}, got {list(found)}"


def header_names(line: bytes, delimiter: str) -> tuple[str, ...]:
    """Return the column names in the first line of a file.

    >>> header_names(b'id,"full, name"', ",")
    ('id', 'full, name')
    """
    text = line.removeprefix(_BYTE_ORDER_MARK)
    table = csv.read_csv(io.BytesIO(text + b"\n"), parse_options=csv.ParseOptions(delimiter=delimiter))
    return tuple(table.column_names)


def infer_csv_types(lines: Sequence[bytes], names: Sequence[str], delimiter: str) -> pa.Schema:
    """Return a type for every column: int64, float64, bool or str, whichever fits all values."""
    if not lines:
        return pa.schema([(name, pa.string()) for name in names])
    return pa.schema([(field.name, _plain(field.type)) for field in _read(lines, names, delimiter, None).schema])


def _read(lines: Sequence[bytes], names: Sequence[str], delimiter: str, schema: pa.Schema | None) -> pa.Table:
    uneven = next((line for line in lines if line.count(b'"') % 2), None)
    if uneven is not None:
        raise pa.ArrowInvalid(f"a quoted field must end on the line on which it began, got {uneven!r:.100}")
    return csv.read_csv(
        io.BytesIO(b"\n".join((*lines, b""))),
        read_options=csv.ReadOptions(column_names=list(names), use_threads=False),
        parse_options=csv.ParseOptions(delimiter=delimiter),
        convert_options=csv.ConvertOptions(
            column_types=schema, include_columns=None if schema is None else schema.names, null_values=[""]
        ),
    )


def _plain(kind: pa.DataType) -> pa.DataType:
    numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return kind if numeric else pa.string()


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))
