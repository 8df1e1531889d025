"""Record formats: TFRecordDataset, TextLineDataset, FixedLengthRecordDataset and from_tar."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, final

from raydist.errors import InvalidArgumentError
from raydist.pipelines.formats.byte_streams import ByteStream
from raydist.pipelines.formats.fixed_records import FixedRecordReader
from raydist.pipelines.formats.lines import LineReader, require_line_limit
from raydist.pipelines.formats.tar_samples import TarSampleReader
from raydist.pipelines.formats.tfrecord import TFRecordReader
from raydist.pipelines.sources.file_format import RecordFormat

__all__ = ["FixedLengthFormat", "TFRecordFormat", "TarFormat", "TextLineFormat"]


@final
@dataclass(frozen=True)
class TFRecordFormat(RecordFormat):
    """Records with a length and checksums.

    Attributes:
        compression_type: None, "GZIP" or "ZLIB".
        max_record_bytes: A record with a larger length counts as damaged.
        limit_given: True if the user set the limit. Otherwise the size of a compressed file bounds its records.
    """

    name: ClassVar[str] = "TFRecordDataset"
    compression_type: str | None
    max_record_bytes: int
    limit_given: bool = field(default=True, metadata={"fingerprint": False})

    def __post_init__(self) -> None:
        if self.max_record_bytes < 1:
            raise InvalidArgumentError(f"max_record_bytes must be >= 1, got {self.max_record_bytes!r}.")

    def reader(self, stream: ByteStream, offset: int, index: int) -> TFRecordReader:
        limit = self.max_record_bytes if self.limit_given else None
        return TFRecordReader(stream, offset=offset, index=index, max_record_bytes=limit)


@final
@dataclass(frozen=True)
class TextLineFormat(RecordFormat):
    """Lines of text.

    Attributes:
        compression_type: None, "GZIP" or "ZLIB".
        max_line_bytes: A longer line counts as damaged; None: see :meth:`ByteStream.piece_limit`.
    """

    name: ClassVar[str] = "TextLineDataset"
    compression_type: str | None
    max_line_bytes: int | None = field(default=None, metadata={"fingerprint": False})

    def __post_init__(self) -> None:
        require_line_limit(self.max_line_bytes)

    def reader(self, stream: ByteStream, offset: int, index: int) -> LineReader:
        return LineReader(stream, offset=offset, index=index, max_line_bytes=self.max_line_bytes)


@final
@dataclass(frozen=True)
class FixedLengthFormat(RecordFormat):
    """Records of one size, between a header and a footer.

    Attributes:
        compression_type: None, "GZIP" or "ZLIB". Sizes count decompressed bytes.
        record_bytes: Bytes of one record, >= 1.
        header_bytes: Bytes before the first record.
        footer_bytes: Bytes after the last record.
    """

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


@final
@dataclass(frozen=True)
class TarFormat(RecordFormat):
    """Samples of tar files, in the layout of `tar_samples.py`.

    Attributes:
        max_sample_bytes: A larger sample counts as damaged; None: see :meth:`ByteStream.piece_limit`.
    """

    name: ClassVar[str] = "from_tar"
    compression_type: str | None = field(default=None, init=False)  # depends on each file's name
    max_sample_bytes: int | None = field(default=None, metadata={"fingerprint": False})

    def __post_init__(self) -> None:
        if self.max_sample_bytes is not None and self.max_sample_bytes < 1:
            raise InvalidArgumentError(f"max_sample_bytes must be >= 1 or None, got {self.max_sample_bytes!r}.")

    def compression_of(self, path: str) -> str | None:
        return "GZIP" if path.lower().endswith((".gz", ".tgz")) else None

    def reader(self, stream: ByteStream, offset: int, index: int) -> TarSampleReader:
        return TarSampleReader(stream, offset=offset, index=index, max_sample_bytes=self.max_sample_bytes)
