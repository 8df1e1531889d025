"""FixedLengthRecordDataset: records of one size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from raydist.errors import InvalidArgumentError
from raydist.pipelines.formats.byte_streams import ByteStream
from raydist.pipelines.formats.fixed_records import FixedRecordReader
from raydist.pipelines.sources.record_files import RecordFormat

__all__ = ["FixedLengthFormat"]


@final
@dataclass(frozen=True)
class FixedLengthFormat(RecordFormat):
    """Records of `record_bytes`, between a header and a footer."""

    name: ClassVar[str] = "FixedLengthRecordDataset"
    compression_type: str | None
    record_bytes: int
    header_bytes: int = 0
    footer_bytes: int = 0

    def __post_init__(self) -> None:
        if self.record_bytes < 1:
            raise InvalidArgumentError(f"record_bytes must be >= 1, got {self.record_bytes!r}.")
        if min(self.header_bytes, self.footer_bytes) < 0:
            raise InvalidArgumentError(
                f"header_bytes and footer_bytes must be >= 0, got {self.header_bytes!r} and {self.footer_bytes!r}."
            )

    def reader(self, stream: ByteStream, offset: int, index: int) -> FixedRecordReader:
        sizes = (self.record_bytes, self.header_bytes, self.footer_bytes)
        return FixedRecordReader(stream, *sizes, offset=offset, index=index)
