"""TFRecord files: reading and writing.

Each record has a frame (little-endian):

    uint64 length | uint32 masked CRC-32C of length | data | uint32 masked CRC-32C of data

The length is used only if its checksum matches, and only up to the bytes that the file can still hold, so damage never
makes a reader allocate memory.

Source: TensorFlow, `tensorflow/core/lib/io/record_writer.h` (the format's definition).
"""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import google_crc32c

from raydist.core.errors import DataLossError, FailedPreconditionError, InvalidArgumentError, SpecError
from raydist.pipelines.formats.byte_streams import WINDOW_BITS, ByteStream, check_compression
from raydist.pipelines.formats.files import create_file, data_loss, path_text
from raydist.pipelines.formats.records import CHUNK_BYTES, RecordReader, SkippedRecordError

MAX_RECORD_BYTES = 1 << 30
"""Default limit of a record in an uncompressed file."""

_HEADER = struct.Struct("<QI")
_LENGTH_BYTES = 8
_FOOTER = struct.Struct("<I")
FRAME_BYTES = _HEADER.size + _FOOTER.size
_MASK_DELTA = 0xA282EAD8
_MAX_KNOWN_LENGTHS = 1 << 10


def masked_crc32c(data: bytes) -> int:
    """Return the CRC-32C of `data`, rotated and shifted so that checksums of data with checksums stay strong.

    >>> hex(masked_crc32c(b"123456789"))
    '0xc78ab0e5'
    """
    crc: int = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def frame(record: bytes) -> bytes:
    """Return `record` with its frame of 16 bytes, as written to a file."""
    length = len(record).to_bytes(_LENGTH_BYTES, "little")
    return b"".join((length, _FOOTER.pack(masked_crc32c(length)), record, _FOOTER.pack(masked_crc32c(record))))


class TFRecordReader(RecordReader):
    """A reader of TFRecord files. A record whose data does not match its checksum is skipped after its error."""

    def __init__(
        self, stream: ByteStream, *, offset: int = 0, index: int = 0, max_record_bytes: int | None = None
    ) -> None:
        """Continue at `offset`, the start of record `index`. `max_record_bytes` defaults to the stream's limit."""
        super().__init__(stream, offset, index)
        self._max_record_bytes = stream.piece_limit() if max_record_bytes is None else max_record_bytes
        self._lengths: dict[bytes, int] = {}  # of intact headers
        self._buffer = b""
        self._at = 0

    def _advance(self, records: list[bytes], limit: int) -> None:
        self._scan(records, limit)
        if len(records) < limit:
            self._read_one(records)

    def _scan(self, records: list[bytes], limit: int) -> None:
        """Append the whole, intact records in the buffer; stop before anything else. Takes 0.8 us per record."""
        buffer, at, first = self._buffer, self._at, len(records)
        checksum, footer_at, known = google_crc32c.value, _FOOTER.unpack_from, self._lengths
        crc_start = len(buffer) - _FOOTER.size
        while len(records) < limit and at + _HEADER.size <= crc_start:
            data = at + _HEADER.size
            header = buffer[at:data]
            end = data + (known.get(header) or self._length(header))
            if not data <= end <= crc_start:
                break
            record = buffer[data:end]
            (stored,) = footer_at(buffer, end)
            crc = checksum(record)
            if stored != (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF:  # masked_crc32c, inlined
                break
            records.append(record)
            at = end + _FOOTER.size
        self.offset += at - self._at
        self.index += len(records) - first
        self._at = at

    def _length(self, header: bytes) -> int:
        """Return the length in a header; negative if damaged or too large. Caches lengths: most records share a few."""
        length, length_crc = _HEADER.unpack(header)
        if length > self._max_record_bytes or length_crc != masked_crc32c(header[:_LENGTH_BYTES]):
            return -1
        if len(self._lengths) < _MAX_KNOWN_LENGTHS:
            self._lengths[header] = length
        return int(length)

    def _read_one(self, records: list[bytes]) -> None:
        """Append the next record of any size, or raise its error."""
        if not self._fill(_HEADER.size):
            left = len(self._buffer) - self._at
            self.ended = True
            if left == 0:
                return
            raise self._loss(f"A record's header must have {_HEADER.size} bytes, but the file ends after {left}")
        length, length_crc = _HEADER.unpack_from(self._buffer, self._at)
        if length_crc != masked_crc32c(self._buffer[self._at : self._at + _LENGTH_BYTES]):
            raise self._loss(f"The checksum of a record's length must match{self._wrong_compression_hint()}")
        self._check_length(length)
        self._at += _HEADER.size
        record = self._take(length)
        (record_crc,) = _FOOTER.unpack(self._take(_FOOTER.size))
        intact = record_crc == masked_crc32c(record)
        loss = self._loss("The checksum of a record's data must match")
        self.offset += _HEADER.size + length + _FOOTER.size
        self.index += 1
        if not intact:
            raise SkippedRecordError(loss)
        records.append(record)

    def _check_length(self, length: int) -> None:
        if length > self._max_record_bytes:
            raise self._loss(
                f"A record may have at most {self._max_record_bytes} bytes, got {length}. "
                "Raise max_record_bytes if the file is right"
            )
        held = len(self._buffer) - self._at - _HEADER.size
        left = self._stream.bound()
        if left is not None and length + _FOOTER.size > held + left:
            raise self._loss(f"A record of {length} bytes must fit into the file, but at most {held + left} are left")

    def _fill(self, size: int) -> bool:
        """Fill the buffer with `size` bytes; return False if the file has fewer."""
        while len(self._buffer) - self._at < size:
            more = self._stream.read(CHUNK_BYTES)
            if not more:
                return False
            self._buffer = self._buffer[self._at :] + more
            self._at = 0
        return True

    def _take(self, size: int) -> bytes:
        """Return the next `size` bytes. Memory is allocated as they arrive."""
        if size <= CHUNK_BYTES and not self._fill(size):
            raise self._truncated()
        if size <= len(self._buffer) - self._at:
            start, self._at = self._at, self._at + size
            return self._buffer[start : self._at]
        return self._gather(size)

    def _gather(self, size: int) -> bytes:
        """Return a record larger than the buffer, with a single copy in memory."""
        gathered = io.BytesIO()
        gathered.write(memoryview(self._buffer)[self._at :])
        self._buffer, self._at = b"", 0
        while gathered.tell() < size:
            more = self._stream.read(min(size - gathered.tell(), CHUNK_BYTES))
            if not more:
                raise self._truncated()
            gathered.write(more)
        return gathered.getvalue()

    def _truncated(self) -> DataLossError:
        return self._loss("A record must be complete, but the file ends inside it")

    def _wrong_compression_hint(self) -> str:
        starts = {b"\x1f\x8b": "GZIP", b"\x78\x01": "ZLIB", b"\x78\x9c": "ZLIB", b"\x78\xda": "ZLIB"}
        looks = starts.get(self._buffer[self._at : self._at + 2]) if self.offset == 0 else None
        return "" if looks is None else f"; the file looks compressed: try compression_type={looks!r}"

    def _loss(self, problem: str) -> DataLossError:
        return data_loss(self._stream.path, self.offset, f"{problem}: record {self.index} is damaged")


@dataclass(frozen=True, slots=True)
class TFRecordOptions:
    """Compression of a TFRecord file (tf.io.TFRecordOptions).

    Attributes:
        compression_type: None (or ""), "GZIP" or "ZLIB". Readers need the same value.
        compression_level: 0 (none) to 9 (smallest), or None for zlib's default (6).

    Raises:
        InvalidArgumentError: Another compression, or a level out of range.

    Source: tf.io.TFRecordOptions (TensorFlow 2.x API).

    >>> TFRecordOptions("GZIP", compression_level=9)
    TFRecordOptions(compression_type='GZIP', compression_level=9)
    """

    compression_type: str | None = None
    compression_level: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "compression_type", check_compression(self.compression_type))
        level = self.compression_level
        if level is not None and not 0 <= level <= 9:
            raise InvalidArgumentError(f"compression_level must be 0 .. 9 or None, got {level!r}.")


class TFRecordWriter:
    """A writer of files that TensorFlow can also read (tf.io.TFRecordWriter).

    An existing file is replaced. Close the writer with `with` or `close()`: an unclosed file may lack its last records.

    Args:
        path: A local path or a URI that fsspec can write.
        options: A TFRecordOptions, or the name of the compression: None, "GZIP" or "ZLIB".

    Raises:
        NotFoundError: The directory does not exist.
        FailedPreconditionError: The file is not writable.
        InvalidArgumentError: `path` is a directory, or the compression is unknown.

    Source: tf.io.TFRecordWriter (TensorFlow 2.x API).

    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "two.tfrecord")
    >>> with TFRecordWriter(path) as writer:
    ...     writer.write(b"first")
    ...     writer.write(b"second")
    >>> os.path.getsize(path)
    43
    """

    def __init__(self, path: Any, options: TFRecordOptions | str | None = None) -> None:
        chosen = options if isinstance(options, TFRecordOptions) else TFRecordOptions(options)
        self._path = path_text(path)
        self._deflater = _deflater(chosen)
        self._file = create_file(self._path)

    def write(self, record: bytes | bytearray | memoryview) -> None:
        """Append one record, which takes 16 bytes more than its data. It may stay in memory until `flush` or `close`.

        Args:
            record: Bytes of the record, any number; copied before this returns.

        Raises:
            SpecError: `record` has another type.
            FailedPreconditionError: The writer is closed.

        Source: tf.io.TFRecordWriter.write (TensorFlow 2.x API).

        >>> import os, tempfile
        >>> with TFRecordWriter(os.path.join(tempfile.mkdtemp(), "x.tfrecord")) as writer:
        ...     writer.write("text")
        Traceback (most recent call last):
        ...
        raydist.core.errors.SpecError: A record must be bytes, got str. Encode text, serialize messages.
        """
        if not isinstance(record, bytes | bytearray | memoryview):
            raise SpecError(f"A record must be bytes, got {type(record).__name__}. Encode text, serialize messages.")
        self._require_open()
        framed = frame(bytes(record))
        self._file.write(framed if self._deflater is None else self._deflater.compress(framed))

    def flush(self) -> None:
        """Pass all records written so far to the operating system: another process can then read them.

        Does not wait for the disk. In a compressed file each call adds some bytes.

        Raises:
            FailedPreconditionError: The writer is closed.

        Source: tf.io.TFRecordWriter.flush (TensorFlow 2.x API).

        >>> import os, tempfile
        >>> import raydist as rd
        >>> path = os.path.join(tempfile.mkdtemp(), "x.tfrecord")
        >>> with TFRecordWriter(path) as writer:
        ...     writer.write(b"first")
        ...     writer.flush()
        ...     list(rd.TFRecordDataset(path))
        [b'first']
        """
        self._require_open()
        if self._deflater is not None:
            self._file.write(self._deflater.flush(zlib.Z_SYNC_FLUSH))
        self._file.flush()

    def close(self) -> None:
        """Write all remaining data and close the file. May be called twice.

        Source: tf.io.TFRecordWriter.close (TensorFlow 2.x API).

        >>> import os, tempfile
        >>> writer = TFRecordWriter(os.path.join(tempfile.mkdtemp(), "x.tfrecord"))
        >>> writer.close()
        >>> writer.write(b"more")
        Traceback (most recent call last):
        ...
        raydist.core.errors.FailedPreconditionError: A TFRecordWriter must be open to write, but ...
        """
        if self._file.closed:
            return
        try:
            if self._deflater is not None:
                self._file.write(self._deflater.flush(zlib.Z_FINISH))
        finally:
            self._file.close()

    def __enter__(self) -> TFRecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._file.closed:
            raise FailedPreconditionError(
                f"A TFRecordWriter must be open to write, but that of {self._path!r} is closed. Open another file: one "
                "that is finished cannot be continued."
            )


def _deflater(options: TFRecordOptions) -> Any:
    if options.compression_type is None:
        return None
    level = -1 if options.compression_level is None else options.compression_level
    return zlib.compressobj(level, zlib.DEFLATED, WINDOW_BITS[options.compression_type])
