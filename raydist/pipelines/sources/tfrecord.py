"""TFRecordDataset: the records of TFRecord files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

from raydist.errors import InvalidArgumentError
from raydist.pipelines.formats.byte_streams import ByteStream, check_compression
from raydist.pipelines.formats.tfrecord import RecordReader
from raydist.pipelines.sources.record_files import RecordFilesOp, RecordFormat

__all__ = ["TFRecordFormat", "tfrecord_op"]


def tfrecord_op(
    filenames: Any, compression_type: str | None, num_parallel_reads: int | None, max_record_bytes: int
) -> RecordFilesOp:
    """From the arguments of `TFRecordDataset`."""
    if max_record_bytes < 1:
        raise InvalidArgumentError(f"max_record_bytes must be >= 1, got {max_record_bytes!r}.")
    record_format = TFRecordFormat(check_compression(compression_type), max_record_bytes)
    return RecordFilesOp.of(filenames, record_format, num_parallel_reads)


@final
@dataclass(frozen=True)
class TFRecordFormat(RecordFormat):
    """Records framed by their length and checksums.

    Attributes:
        compression_type: None, "GZIP" or "ZLIB".
        max_record_bytes: A record that claims to be longer is damage.
    """

    name: ClassVar[str] = "TFRecordDataset"
    compression_type: str | None
    max_record_bytes: int

    def reader(self, stream: ByteStream, offset: int, index: int) -> RecordReader:
        return RecordReader(stream, offset=offset, index=index, max_record_bytes=self.max_record_bytes)
