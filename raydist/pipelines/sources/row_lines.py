"""Datasets of text files with one row per line: Dataset.from_csv and Dataset.from_json."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa

from raydist.core.errors import SpecError
from raydist.pipelines.elements.arrow_fields import Conversion
from raydist.pipelines.elements.arrow_rows import RowSchema
from raydist.pipelines.elements.items import ElementError, Item
from raydist.pipelines.formats.byte_streams import open_stream
from raydist.pipelines.formats.files import data_loss, require_limit
from raydist.pipelines.formats.records import LineReader
from raydist.pipelines.sources.file_format import TableFormat, TableReader

PARSE_ERRORS = (pa.ArrowException, ValueError, UnicodeError, KeyError)

_MIN_LINES = 64  # parsing has a fixed cost of about 50 us
_SAMPLE_LINES = 1000
_BLANK = b" \t\r"


def first_lines(path: str, compression_type: str | None, max_line_bytes: int | None = None) -> list[bytes]:
    """Return up to 1000 lines from the beginning of a file, without blank ones, to infer the columns."""
    require_limit("max_line_bytes", max_line_bytes)
    with closing(LineReader(open_stream(path, compression_type), max_line_bytes=max_line_bytes)) as reader:
        lines, error = reader.read(_SAMPLE_LINES)
    if error is not None and not lines:
        raise error
    return [line for line in lines if line.strip(_BLANK)]


def first_rows(
    paths: Sequence[str], compression_type: str | None, max_line_bytes: int | None, header_lines: int
) -> tuple[str, list[bytes]]:
    """Return the first file with more than a header, and its lines after the header, to infer types.

    If there is none, return the last file and no lines.
    """
    for path in paths:
        lines = first_lines(path, compression_type, max_line_bytes)[header_lines:]
        if lines:
            break
    return path, lines


class LineParser(ABC):
    """Interface of a picklable parser of lines with one row each."""

    what: ClassVar[str]
    """Required content of a line, for messages."""

    schema: pa.Schema
    """Schema of the batches."""

    has_header: bool
    """True if the first line of a file is not a row."""

    @abstractmethod
    def parse(self, lines: Sequence[bytes]) -> pa.RecordBatch:
        """Return the rows of lines, at least one, none blank. Raises ArrowException or ValueError for wrong lines."""

    @abstractmethod
    def check_header(self, line: bytes) -> str | None:
        """Return the problem of the first line of a file; None if there is none."""


@dataclass(frozen=True, eq=False)
class RowLinesFormat(TableFormat):
    """A format of lines that `parser` parses."""

    made_by: str  # the method that makes the dataset
    parser: LineParser
    compression_type: str | None = None
    max_line_bytes: int | None = field(default=None, metadata={"fingerprint": False})
    conversion: Conversion = field(default=Conversion(), metadata={"fingerprint": "if given"})

    @property
    def name(self) -> str:  # type: ignore[override]  # one class serves several methods
        return self.made_by

    @property
    def label(self) -> str:
        return f"compression_type={self.compression_type!r}"

    @property
    def spec(self) -> Any:
        return self.rows.spec

    @cached_property
    def rows(self) -> RowSchema:
        """Converter of record batches to blocks."""
        return RowSchema(self.parser.schema, self.conversion)

    def starts_anywhere(self, path: str) -> bool:
        return self.compression_type is None

    def open(self, path: str, position: Sequence[int]) -> TableReader:
        stream = open_stream(path, self.compression_type)
        try:
            offset, index = position or (0, 0)
            lines = LineReader(stream, offset=offset, index=index, max_line_bytes=self.max_line_bytes)
            reader = RowLinesReader(self, lines)
            if self.parser.has_header and not position:
                reader.pass_header()
        except BaseException:
            stream.close()
            raise
        return reader


class _Line(NamedTuple):
    content: bytes
    number: int
    offset: int


class RowLinesReader(TableReader):
    """A reader that parses many lines at a time. Bisection finds wrong lines, which become errors in their place."""

    def __init__(self, table_format: RowLinesFormat, lines: LineReader) -> None:
        self.ended = False
        self._format = table_format
        self._lines = lines

    def pass_header(self) -> None:
        """Read the first line. Raise SpecError if it differs from the header of the dataset."""
        lines, error = self._lines.read(1)
        if error is not None:
            raise error
        problem = self._format.parser.check_header(lines[0]) if lines else "must be there, but the file is empty"
        if problem is not None:
            raise SpecError(f"The first line of {self._lines.path!r} {problem}.")

    def position(self) -> list[int]:
        return [self._lines.offset, self._lines.index]

    def read(self, limit: int) -> list[Item]:
        first = self._lines.index
        contents, error = self._lines.read(max(limit, _MIN_LINES))
        numbered = zip(contents, range(first, first + len(contents)), self._lines.starts, strict=True)
        lines = [_Line(*line) for line in numbered if line[0].strip(_BLANK)]
        self.ended = self._lines.ended
        items = self._parse(lines) if lines else []
        return items if error is None else [*items, ElementError(error)]

    def _parse(self, lines: Sequence[_Line]) -> list[Item]:
        try:
            batch = self._format.parser.parse([line.content for line in lines])
            if batch.num_rows != len(lines):
                raise pa.ArrowInvalid(f"it holds {batch.num_rows} rows")
        except PARSE_ERRORS as error:
            if len(lines) == 1:
                content, number, offset = lines[0]
                problem = f"Line {number + 1} must be {self._format.parser.what}, got {content!r:.100}: {error}"
                return [ElementError(data_loss(self._lines.path, offset, problem))]
            middle = len(lines) // 2
            return [*self._parse(lines[:middle]), *self._parse(lines[middle:])]
        return self._format.rows.items(batch, lambda row, column: self._missing(lines[row], column))

    def _missing(self, line: _Line, column: str) -> SpecError:
        filled = "fill_null" if self._format.made_by == "from_json" else "column_defaults"
        return SpecError(
            f"Elements must not have nulls, but column {column!r} has no value in line {line.number + 1} of "
            f"{self._lines.path!r} (byte {line.offset}). Give a default for it, {filled}={{{column!r}: value}}, or "
            "leave the column out."
        )

    def close(self) -> None:
        self._lines.close()
