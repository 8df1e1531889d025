"""Conversion of lines of JSON objects to record batches."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import pyarrow as pa
from pyarrow import json

from raydist.pipelines.formats.lines import LineParser

__all__ = ["MAX_JSON_DEPTH", "JsonParser", "infer_json_types"]

MAX_JSON_DEPTH = 100
"""Greatest nesting of a line's lists and objects. Arrow parses them by recursion, which can crash the process."""

_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[{]|[\]}]', re.DOTALL)
_STEPS = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}


@final
@dataclass(frozen=True)
class JsonParser(LineParser):
    """A parser of lines with one object each.

    Attributes:
        schema: Fields to keep, with their types.
        others_allowed: True if objects may have other fields.
        has_header: Always False.
    """

    what: ClassVar[str] = "one JSON object with the dataset's fields"
    schema: pa.Schema
    others_allowed: bool = False
    has_header: bool = False

    def parse(self, lines: Sequence[bytes]) -> pa.RecordBatch:
        unexpected = "ignore" if self.others_allowed else "error"
        options = json.ParseOptions(explicit_schema=self.schema, unexpected_field_behavior=unexpected)
        table = _read(lines, options).select(self.schema.names)
        batch = table.combine_chunks().to_batches()[0]
        batch.validate(full=True)  # the parser accepts any bytes as text
        return batch

    def check_header(self, line: bytes) -> str | None:
        return None


def infer_json_types(lines: Sequence[bytes]) -> pa.Schema:
    """Return a type for every field of these objects; text that looks like a date stays text."""
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
