"""TextLineDataset: the lines of text files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from raydist.pipelines.formats.byte_streams import ByteStream
from raydist.pipelines.formats.lines import LineReader
from raydist.pipelines.sources.record_files import RecordFormat

__all__ = ["TextLineFormat"]


@final
@dataclass(frozen=True)
class TextLineFormat(RecordFormat):
    """Lines of text."""

    name: ClassVar[str] = "TextLineDataset"
    compression_type: str | None

    def reader(self, stream: ByteStream, offset: int, index: int) -> LineReader:
        return LineReader(stream, offset=offset, index=index)
