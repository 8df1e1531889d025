"""Files of blocks: an Arrow IPC stream or a Parquet file, in chunks with checksums.

Every byte belongs to one chunk, and every checksum is verified before use. A stream is compressed chunk by chunk, so
that the whole file is a `.gz`, `.zst` or `.lz4` file that usual tools can read (these formats allow several frames).
Parquet compresses its columns itself.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import google_crc32c
import pyarrow as pa
import pyarrow.parquet as pq

from raydist.core.errors import InvalidArgumentError
from raydist.pipelines.formats.files import OpenFile, ReadableFile, data_loss, file_errors, read_range
from raydist.pipelines.formats.parquet_file import read_footer

COMPRESSIONS = {"GZIP": "gz", "ZSTD": "zst", "LZ4": "lz4", "SNAPPY": "snappy"}
"""Names of compressions, and the suffixes of their files."""

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
MAX_CHUNK_BYTES = 1 << 31
"""Limit for one chunk; usual chunks have a few MB."""

_USUAL_CHUNK_BYTES = 1 << 25  # accepted size of a chunk in memory in files of others, whatever its size in the file
_USUAL_RATIO = 64  # accepted ratio above that


class Chunk(NamedTuple):
    """A byte range of a file."""

    offset: int
    size: int
    crc32c: int
    rows: int  # number of elements; 0 for data without elements, such as a schema
    raw_size: int  # bytes before compression


def crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C of `data`.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    value: int = google_crc32c.value(bytes(data))
    return value


class ChunkWriter(io.RawIOBase):
    """A file that computes a checksum for each chunk. Closing it does not close `file`."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self.path = path
        self.chunks: list[Chunk] = []
        self._file = file
        self._start = self._at = 0
        self._crc = 0

    def write(self, data: Any) -> int:
        content = bytes(data)
        with file_errors(self.path, self._at):
            self._file.write(content)
        self._crc = google_crc32c.extend(self._crc, content)
        self._at += len(content)
        return len(content)

    def end_chunk(self, rows: int, raw_size: int | None = None) -> None:
        """End a chunk of all bytes since the last call. Does nothing if there are none."""
        size = self._at - self._start
        if size:
            self.chunks.append(Chunk(self._start, size, self._crc, rows, size if raw_size is None else raw_size))
            self._start = self._at
            self._crc = 0

    def tell(self) -> int:
        return self._at

    def writable(self) -> bool:
        return True


def read_chunk(file: ReadableFile, path: str, chunk: Chunk) -> bytes:
    """Return the bytes of a chunk.

    Raises:
        DataLossError: The bytes are incomplete, or their checksum differs.
    """
    with file_errors(path, chunk.offset):
        data = read_range(file, chunk.offset, chunk.size)
    if len(data) < chunk.size:
        missing = chunk.size - len(data)
        raise data_loss(path, chunk.offset, f"A chunk must have {chunk.size} bytes, but {missing} of them are missing")
    if crc32c(data) != chunk.crc32c:
        problem = f"The checksum of a chunk of {chunk.rows} elements must match. Restore the file or write it anew"
        raise data_loss(path, chunk.offset, problem)
    return data


@dataclass(frozen=True, slots=True)
class Container:
    """The format and compression of files."""

    format: str  # "arrow" or "parquet"
    compression: str | None  # a name of COMPRESSIONS, or None

    @classmethod
    def of(cls, file_format: str, compression: str | None) -> Container:
        """Check the arguments of a user.

        >>> Container.of("arrow", "GZIP").suffix
        'arrows.gz'
        """
        if file_format not in ("arrow", "parquet"):
            raise InvalidArgumentError(f'format must be "arrow" or "parquet", got {file_format!r}.')
        if compression not in (None, "", "NONE", *COMPRESSIONS):
            names = ", ".join(map(repr, COMPRESSIONS))
            raise InvalidArgumentError(f"compression must be None or one of {names}, got {compression!r}.")
        return cls(file_format, compression if compression in COMPRESSIONS else None)

    @property
    def suffix(self) -> str:
        """Suffix of the files."""
        if self.format == "parquet":
            return "parquet"
        return "arrows" + (f".{COMPRESSIONS[self.compression]}" if self.compression else "")

    def writer(self, file: ChunkWriter, schema: pa.Schema) -> ContainerWriter:
        """Return a writer of record batches for a new file."""
        if self.format == "parquet":
            return _ParquetWriter(file, schema, self.compression)
        return _StreamWriter(file, schema, self.compression)

    def reader(
        self, opened: OpenFile, path: str, chunks: tuple[Chunk, ...], max_chunk_bytes: int | None = None
    ) -> ContainerReader:
        """Return a reader of single chunks of an open file. Verifies the checksums of the chunks without elements.

        Args:
            opened: The file.
            path: Path of the file, for messages.
            chunks: All chunks of the file.
            max_chunk_bytes: Largest size of a decompressed chunk. None: 32 MiB, or 64 times the compressed size.
        """
        frame = [read_chunk(opened.file, path, chunk) for chunk in chunks if not chunk.rows]
        data = [chunk for chunk in chunks if chunk.rows]
        if self.format == "parquet":
            return _ParquetReader(opened, path, data)
        head = next((chunk for chunk in chunks if not chunk.rows), None)
        if head is None or head.offset:
            raise data_loss(path, 0, f"A stream must begin with its schema, but the manifest has {head} there")
        schema = pa.ipc.read_schema(pa.py_buffer(_inflated(frame[0], head, self.compression, path, max_chunk_bytes)))
        return _StreamReader(opened.file, path, data, schema, self.compression, max_chunk_bytes)


class _StreamWriter:
    def __init__(self, file: ChunkWriter, schema: pa.Schema, compression: str | None) -> None:
        self._file = file
        self._codec = None if compression is None else pa.Codec(compression.lower())
        self._put(schema.serialize(), 0)

    def write(self, batch: pa.RecordBatch) -> None:
        """Append one chunk."""
        self._put(batch.serialize(), batch.num_rows)

    def finish(self) -> None:
        """Write the end of the file."""
        self._put(pa.py_buffer(_END_OF_STREAM), 0)

    def _put(self, message: pa.Buffer, rows: int) -> None:
        if message.size > MAX_CHUNK_BYTES:
            raise InvalidArgumentError(f"One element may have at most {MAX_CHUNK_BYTES} bytes, got {message.size}.")
        self._file.write(memoryview(message if self._codec is None else self._codec.compress(message)))
        self._file.end_chunk(rows, message.size)


def _inflated(data: bytes, chunk: Chunk, compression: str | None, path: str, limit: int | None) -> Any:
    if compression is None:
        return data
    most = max(_USUAL_CHUNK_BYTES, _USUAL_RATIO * chunk.size) if limit is None else limit
    if chunk.raw_size > min(most, MAX_CHUNK_BYTES):
        raise data_loss(
            path,
            chunk.offset,
            f"A chunk may have at most {most} bytes, but {chunk.size} compressed ones are to become {chunk.raw_size}. "
            "Raise max_chunk_bytes if the file is right",
        )
    return pa.Codec(compression.lower()).decompress(data, chunk.raw_size)


@dataclass(frozen=True, slots=True)
class _StreamReader:
    _file: ReadableFile
    _path: str
    _chunks: list[Chunk]
    _schema: pa.Schema
    _compression: str | None
    _max_chunk_bytes: int | None

    def read(self, number: int) -> pa.RecordBatch:
        """Return chunk `number` of the chunks with elements. Raises DataLossError if it is damaged."""
        chunk = self._chunks[number]
        data = read_chunk(self._file, self._path, chunk)
        message = _inflated(data, chunk, self._compression, self._path, self._max_chunk_bytes)
        return pa.ipc.read_record_batch(pa.py_buffer(message), self._schema)


class _ParquetWriter:
    def __init__(self, file: ChunkWriter, schema: pa.Schema, compression: str | None) -> None:
        self._file = file
        self._writer = pq.ParquetWriter(file, schema, compression=(compression or "NONE").lower())
        file.end_chunk(0)

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_table(pa.Table.from_batches([batch]), row_group_size=batch.num_rows)
        self._file.end_chunk(batch.num_rows)

    def finish(self) -> None:
        self._writer.close()
        self._file.end_chunk(0)


class _ParquetReader:
    """A reader whose chunks are row groups: it verifies the checksum of the bytes, then pyarrow reads them again."""

    def __init__(self, opened: OpenFile, path: str, chunks: list[Chunk]) -> None:
        self._file = opened.file
        self._path = path
        self._chunks = chunks
        read_footer(opened)  # raises ValueError for a footer that would crash Arrow
        self._parquet = pq.ParquetFile(pa.PythonFile(opened.file, mode="r"))

    def read(self, number: int) -> pa.RecordBatch:
        read_chunk(self._file, self._path, self._chunks[number])
        batches = self._parquet.read_row_group(number, use_threads=False).combine_chunks().to_batches()
        return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


ContainerWriter = _StreamWriter | _ParquetWriter
ContainerReader = _StreamReader | _ParquetReader
