"""Dataset.from_json: the objects of JSON Lines files."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa
from pyarrow import json

from raydist.core.errors import DataLossError, InvalidArgumentError
from raydist.core.values import UNKNOWN_CARDINALITY
from raydist.pipelines.elements.arrow_fields import Conversion
from raydist.pipelines.formats.byte_streams import check_compression
from raydist.pipelines.sources.row_lines import PARSE_ERRORS, LineParser, RowLinesFormat, first_rows
from raydist.pipelines.sources.table_files import TableFilesOp, table_paths

_AS_IT_IS = Conversion()
MAX_JSON_DEPTH = 100
"""Greatest nesting of a line's lists and objects. Arrow parses them by recursion, which can crash the process."""

_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[{]|[\]}]', re.DOTALL)
_STEPS = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}


def json_op(
    paths: Any,
    columns: Sequence[str] | None = None,
    compression_type: str | None = None,
    max_line_bytes: int | None = None,
    conversion: Conversion = _AS_IT_IS,
) -> TableFilesOp:
    """Return the operation for the arguments of `from_json`. Reads the beginning of the first file that has a line."""
    files, compression = table_paths(paths, "from_json"), check_compression(compression_type)
    path, lines = first_rows(files, compression, max_line_bytes, 0)
    if not lines:
        raise InvalidArgumentError(f"A file must have a line to tell the fields, but {path!r} and others are empty.")
    try:
        inferred = infer_json_types(lines)
    except PARSE_ERRORS as error:
        raise DataLossError(
            f"The first lines of {path!r} must be JSON objects of one kind, but they cannot be parsed: {error}.",
            path=path,
        ) from error
    parser = JsonParser(_selected(path, inferred, columns), columns is not None)
    conversion.check(parser.schema)
    table_format = RowLinesFormat("from_json", parser, compression, max_line_bytes, conversion)
    _ = table_format.rows  # checks that every field can be a leaf
    return TableFilesOp(files, table_format, UNKNOWN_CARDINALITY)


def _selected(path: str, inferred: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    names = inferred.names if columns is None else list(columns)
    unknown = [name for name in names if name not in inferred.names]
    if unknown or isinstance(columns, str) or not names:
        raise InvalidArgumentError(
            f"columns must name fields of the objects in {path!r} ({', '.join(inferred.names):.500}), got "
            f"{unknown or columns!r}."
        )
    return pa.schema([inferred.field(name) for name in names])


@dataclass(frozen=True)
class JsonParser(LineParser):
    """A parser of lines with one object each."""

    what: ClassVar[str] = "one JSON object with the dataset's fields"
    schema: pa.Schema  # fields to keep, with their types
    others_allowed: bool = False  # True if objects may have other fields
    has_header: bool = False

    def parse(self, lines: Sequence[bytes]) -> pa.RecordBatch:
        unexpected = "ignore" if self.others_allowed else "error"
        options = json.ParseOptions(explicit_schema=self.schema, unexpected_field_behavior=unexpected)
        table = _read_json(lines, options).select(self.schema.names)
        batch = table.combine_chunks().to_batches()[0]
        batch.validate(full=True)  # the parser accepts any bytes as text
        return batch

    def check_header(self, line: bytes) -> str | None:
        return None


def infer_json_types(lines: Sequence[bytes]) -> pa.Schema:
    """Return a type for every field of these objects; text that looks like a date stays text."""
    found = _read_json(lines, json.ParseOptions()).schema
    return pa.schema([pa.field(field.name, _without_dates(field.type)) for field in found])


def _without_dates(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_without_dates(kind.value_type))
    if pa.types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return pa.struct([(field.name, _without_dates(field.type)) for field in fields])
    return kind


def _read_json(lines: Sequence[bytes], options: json.ParseOptions) -> pa.Table:
    for line in lines:
        if line.count(b"[") + line.count(b"{") > MAX_JSON_DEPTH:  # 0.1 us; few lines have as many
            _require_shallow(line)
    content = b"\n".join((*lines, b""))
    read_options = json.ReadOptions(use_threads=False, block_size=len(content) + 1)
    return json.read_json(io.BytesIO(content), read_options=read_options, parse_options=options)


def _require_shallow(line: bytes) -> None:
    depth = 0
    for token in _TOKEN.finditer(line):
        depth += _STEPS.get(token[0], 0)
        if depth > MAX_JSON_DEPTH:
            raise ValueError(f"lists and objects may be nested {MAX_JSON_DEPTH} deep, byte {token.start()} goes deeper")
