"""Formats of files of blocks: an Arrow IPC stream or a Parquet file, each divided into chunks.

A stream is compressed chunk by chunk, so that the whole file is a `.gz`, `.zst` or `.lz4` file that usual tools can
read (these formats allow several frames). Parquet compresses its columns itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, final

import pyarrow as pa
import pyarrow.parquet as pq

from raydist.errors import InvalidArgumentError
from raydist.pipelines.formats.files import OpenFile, data_loss
from raydist.pipelines.formats.parquet_file import read_footer
from raydist.pipelines.stored.chunks import Chunk, ChunkWriter, read_chunk

__all__ = ["COMPRESSIONS", "MAX_CHUNK_BYTES", "Container", "ContainerReader", "ContainerWriter"]

COMPRESSIONS = {"GZIP": "gz", "ZSTD": "zst", "LZ4": "lz4", "SNAPPY": "snappy"}
"""Names of compressions, and the suffixes of their files."""

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
MAX_CHUNK_BYTES = 1 << 31
"""Limit for one chunk; usual chunks have a few MB."""

_USUAL_CHUNK_BYTES = 1 << 25  # accepted size of a chunk in memory in files of others, whatever its size in the file
_USUAL_RATIO = 64  # accepted ratio above that


class ContainerWriter(ABC):
    """A writer of record batches of one schema to one file."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Append one chunk."""

    @abstractmethod
    def finish(self) -> None:
        """Write the end of the file."""


class ContainerReader(ABC):
    """A reader of single chunks of one file."""

    @abstractmethod
    def read(self, number: int) -> pa.RecordBatch:
        """Return chunk `number` of the chunks with elements. Raises DataLossError if it is damaged."""


@final
@dataclass(frozen=True, slots=True)
class Container:
    """The format and compression of files.

    Attributes:
        format: "arrow" or "parquet".
        compression: A name of COMPRESSIONS, or None.
    """

    format: str
    compression: str | None

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
        """Return a writer for a new file."""
        if self.format == "parquet":
            return _ParquetWriter(file, schema, self.compression)
        return _StreamWriter(file, schema, self.compression)

    def reader(
        self, opened: OpenFile, path: str, chunks: tuple[Chunk, ...], max_chunk_bytes: int | None = None
    ) -> ContainerReader:
        """Return a reader of an open file. Verifies the checksums of the chunks without elements.

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
        return _StreamReader(opened, path, data, schema, self.compression, max_chunk_bytes)


@final
class _StreamWriter(ContainerWriter):
    def __init__(self, file: ChunkWriter, schema: pa.Schema, compression: str | None) -> None:
        self._file = file
        self._codec = None if compression is None else pa.Codec(compression.lower())
        self._put(schema.serialize(), 0)

    def write(self, batch: pa.RecordBatch) -> None:
        self._put(batch.serialize(), batch.num_rows)

    def finish(self) -> None:
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


@final
class _StreamReader(ContainerReader):
    def __init__(
        self,
        opened: OpenFile,
        path: str,
        chunks: list[Chunk],
        schema: pa.Schema,
        compression: str | None,
        max_chunk_bytes: int | None,
    ) -> None:
        self._file = opened.file
        self._path = path
        self._chunks = chunks
        self._schema = schema
        self._compression = compression
        self._max_chunk_bytes = max_chunk_bytes

    def read(self, number: int) -> pa.RecordBatch:
        chunk = self._chunks[number]
        data = read_chunk(self._file, self._path, chunk)
        message = _inflated(data, chunk, self._compression, self._path, self._max_chunk_bytes)
        return pa.ipc.read_record_batch(pa.py_buffer(message), self._schema)


@final
class _ParquetWriter(ContainerWriter):
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


@final
class _ParquetReader(ContainerReader):
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
