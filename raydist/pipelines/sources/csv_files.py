"""Dataset.from_csv: the rows of files of comma-separated values."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from raydist.core.errors import DataLossError, InvalidArgumentError, RaydistError, SpecError
from raydist.core.values import UNKNOWN_CARDINALITY
from raydist.pipelines.elements.leaf_values import as_leaf
from raydist.pipelines.elements.spec import as_dtype, spec_of_value
from raydist.pipelines.formats.byte_streams import check_compression
from raydist.pipelines.sources.row_lines import PARSE_ERRORS, LineParser, RowLinesFormat, first_lines, first_rows
from raydist.pipelines.sources.table_files import TableFilesOp, table_paths

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def csv_op(
    paths: Any,
    columns: Sequence[str | int] | None = None,
    column_types: Mapping[str, Any] | None = None,
    column_defaults: Mapping[str, Any] | Sequence[Any] | None = None,
    column_names: Sequence[str] | None = None,
    delimiter: str = ",",
    compression_type: str | None = None,
    max_line_bytes: int | None = None,
) -> TableFilesOp:
    """Return the operation for the arguments of `from_csv`. Reads the beginning of the first file."""
    files, compression = table_paths(paths, "from_csv"), check_compression(compression_type)
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n':
        raise InvalidArgumentError(f"delimiter must be one character, no quote or line end, got {delimiter!r}.")
    lines = first_lines(files[0], compression, max_line_bytes)
    try:
        names = _names(files[0], lines, column_names, delimiter)
        selected = _selected(files[0], names, columns, column_types or {})
        types, defaults = _types_and_defaults(selected, column_types or {}, column_defaults)
        _, rows = first_rows(files, compression, max_line_bytes, 1 if column_names is None else 0)
        schema = _schema(rows, names, selected, types, delimiter)
    except PARSE_ERRORS as error:
        if isinstance(error, RaydistError):
            raise
        raise DataLossError(
            f"The first lines of {files[0]!r} must tell the columns, but they cannot be parsed: {error}. Give "
            "column_types for all columns to read the file all the same.",
            path=files[0],
        ) from error
    _check_defaults(schema, defaults)
    parser = CsvParser(schema, names, column_names is None, delimiter, defaults)
    table_format = RowLinesFormat("from_csv", parser, compression, max_line_bytes)
    _ = table_format.rows  # checks that every column can be a leaf
    return TableFilesOp(files, table_format, UNKNOWN_CARDINALITY)


def _names(path: str, lines: Sequence[bytes], column_names: Sequence[str] | None, delimiter: str) -> tuple[str, ...]:
    if column_names is None and not lines:
        raise ValueError("the file has no header; give column_names")
    names = header_names(lines[0], delimiter) if column_names is None else tuple(column_names)
    if len(set(names)) < len(names):
        raise SpecError(
            f"Columns must have different names, got {list(names)} in {path!r}. Rename them with column_names."
        )
    return names


def _selected(
    path: str, names: Sequence[str], columns: Sequence[str | int] | None, types: Mapping[str, Any]
) -> list[str]:
    selected: list[Any] = [_by_number(column, names) for column in (names if columns is None else columns)]
    wrong = columns if isinstance(columns, str) else [name for name in (*selected, *types) if name not in names]
    if wrong or not selected:
        raise InvalidArgumentError(
            f"columns and column_types must name columns of the file {path!r} ({', '.join(names):.500}), got "
            f"{wrong or columns!r}."
        )
    return selected


def _by_number(column: str | int, names: Sequence[str]) -> str | int:
    if isinstance(column, int) and not isinstance(column, bool) and 0 <= column < len(names):
        return names[column]
    return column  # unknown columns raise one common error


def _types_and_defaults(
    selected: Sequence[str], types: Mapping[str, Any], given: Mapping[str, Any] | Sequence[Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the types of columns and the values for empty fields. A type given as a value counts as a type."""
    if given is None or isinstance(given, Mapping):
        places = dict(given or {})
        known = {name: value for name, value in places.items() if _is_dtype(value)}
    else:
        if isinstance(given, str | bytes) or len(given) != len(selected):
            raise InvalidArgumentError(
                f"column_defaults must be one value or dtype for each column, {', '.join(selected):.500}, or a dict of "
                f"some, got {given!r:.200}."
            )
        places = dict(zip(selected, given, strict=True))
        known = {
            name: value if _is_dtype(value) else spec_of_value(as_leaf(value)).dtype for name, value in places.items()
        }
    return known | dict(types), {name: value for name, value in places.items() if not _is_dtype(value)}


def _is_dtype(value: Any) -> bool:
    return isinstance(value, np.dtype | type) or type(value).__module__ == "torch"


def _schema(
    rows: Sequence[bytes], names: Sequence[str], selected: Sequence[str], types: Mapping[str, Any], delimiter: str
) -> pa.Schema:
    """Return the given types, and types inferred from the first rows."""
    given = {name: _arrow_type(dtype) for name, dtype in types.items()}
    if not given.keys() >= set(selected):
        inferred = infer_csv_types(rows, names, delimiter)
        given = {name: inferred.field(name).type for name in names} | given
    return pa.schema([(name, given[name]) for name in selected])


def _arrow_type(dtype: Any) -> pa.DataType:
    found = as_dtype(dtype)
    if found.kind == "c" or found == np.float16:
        raise InvalidArgumentError(f"column_types must be types that CSV can hold, got {dtype!r}. Convert it in a map.")
    return {"S": pa.binary(), "U": pa.string()}.get(found.kind) or pa.from_numpy_dtype(found)


def _check_defaults(schema: pa.Schema, defaults: Mapping[str, Any]) -> None:
    for name, value in defaults.items():
        try:
            fits = pa.scalar(value, schema.field(name).type).is_valid
        except (*PARSE_ERRORS, TypeError):
            fits = False
        if not fits:
            columns = ", ".join(f"{field.name}: {field.type}" for field in schema)
            raise InvalidArgumentError(
                f"column_defaults must fit the columns ({columns:.500}), got {value!r} for {name!r}."
            )


@dataclass(frozen=True)
class CsvParser(LineParser):
    """A parser of lines with one row each."""

    what: ClassVar[str] = "one row of the CSV columns"
    schema: pa.Schema  # columns to keep, with their types
    names: tuple[str, ...]  # all columns of the file, in order
    has_header: bool = True
    delimiter: str = ","  # one character
    defaults: Mapping[str, Any] = field(default_factory=dict)  # values for empty fields

    def parse(self, lines: Sequence[bytes]) -> pa.RecordBatch:
        table = _read_csv(lines, self.names, self.delimiter, self.schema)
        columns = [self._filled(name, table.column(name)) for name in self.schema.names]
        return pa.table(columns, schema=self.schema).combine_chunks().to_batches()[0]

    def _filled(self, name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
        if name not in self.defaults:
            return column
        default = pa.scalar(self.defaults[name], column.type)
        is_text = pa.types.is_string(column.type) or pa.types.is_binary(column.type)
        empty = pc.equal(pc.binary_length(column), 0) if is_text else pc.is_null(column)
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
    return pa.schema([(field.name, _plain(field.type)) for field in _read_csv(lines, names, delimiter, None).schema])


def _read_csv(lines: Sequence[bytes], names: Sequence[str], delimiter: str, schema: pa.Schema | None) -> pa.Table:
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
