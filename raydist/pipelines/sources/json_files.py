"""Dataset.from_json: the objects of JSON Lines files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from raydist.errors import DataLossError, InvalidArgumentError
from raydist.pipelines.elements.arrow_fields import Conversion
from raydist.pipelines.formats.byte_streams import check_compression
from raydist.pipelines.formats.json_lines import JsonParser, infer_json_types
from raydist.pipelines.sources.row_lines import PARSE_ERRORS, RowLinesFormat, first_rows
from raydist.pipelines.sources.table_files import TableFilesOp, table_paths
from raydist.values import UNKNOWN_CARDINALITY

__all__ = ["json_op"]

_AS_IT_IS = Conversion()


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
