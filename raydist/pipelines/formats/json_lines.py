"""Lines of JSON objects as record batches."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import pyarrow as pa
from pyarrow import json

from raydist.pipelines.formats.lines import LineParser

__all__ = ["JsonParser", "infer_json_types"]


@final
@dataclass(frozen=True)
class JsonParser(LineParser):
    """Parses lines that each hold one object.

    Attributes:
        schema: The fields to keep, and their types.
        others_allowed: Whether objects may have further fields.
        has_header: Never.
    """

    what: ClassVar[str] = "one JSON object with the dataset's fields"
    schema: pa.Schema
    others_allowed: bool = False
    has_header: bool = False

    def parse(self, lines: Sequence[bytes]) -> pa.RecordBatch:
        unexpected = "ignore" if self.others_allowed else "error"
        options = json.ParseOptions(explicit_schema=self.schema, unexpected_field_behavior=unexpected)
        table = _read(lines, options).select(self.schema.names)
        return table.combine_chunks().to_batches()[0]

    def check_header(self, line: bytes) -> str | None:
        return None


def infer_json_types(lines: Sequence[bytes]) -> pa.Schema:
    """A type for every field of these objects; text that looks like a date stays text."""
    found = _read(lines, json.ParseOptions()).schema
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


def _read(lines: Sequence[bytes], options: json.ParseOptions) -> pa.Table:
    content = b"\n".join((*lines, b""))
    read_options = json.ReadOptions(use_threads=False, block_size=len(content) + 1)
    return json.read_json(io.BytesIO(content), read_options=read_options, parse_options=options)
