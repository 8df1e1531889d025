from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raydist.core.errors import DataLossError, InvalidArgumentError
from raydist.pipelines.formats.files import OpenFile
from raydist.pipelines.stored.containers import COMPRESSIONS, Chunk, ChunkWriter, Container, crc32c, read_chunk

BATCHES = [pa.RecordBatch.from_pydict({"x": list(range(start, start + 100))}) for start in (0, 100)]


def written(container: Container) -> tuple[bytes, tuple[Chunk, ...]]:
    file = io.BytesIO()
    chunks = ChunkWriter(file, "x")
    writer = container.writer(chunks, BATCHES[0].schema)
    for batch in BATCHES:
        writer.write(batch)
    writer.finish()
    return file.getvalue(), tuple(chunks.chunks)


@pytest.mark.parametrize("compression", [None, *COMPRESSIONS])
@pytest.mark.parametrize("file_format", ["arrow", "parquet"])
def test_what_is_written_is_read(file_format: str, compression: str | None) -> None:
    container = Container.of(file_format, compression)
    content, chunks = written(container)
    assert sum(chunk.size for chunk in chunks) == len(content)
    reader = container.reader(OpenFile(io.BytesIO(content), len(content)), "x", chunks)
    assert [reader.read(number) for number in (1, 0)] == BATCHES[::-1]


def test_other_tools_read_the_files(tmp_path: Path) -> None:
    table = pa.Table.from_batches(BATCHES)
    assert pa.ipc.open_stream(written(Container.of("arrow", None))[0]).read_all() == table
    for compression in ("GZIP", "ZSTD", "LZ4"):
        content = pa.BufferReader(written(Container.of("arrow", compression))[0])
        with pa.CompressedInputStream(content, compression.lower()) as stream:
            assert pa.ipc.open_stream(stream).read_all() == table
    (tmp_path / "x").write_bytes(written(Container.of("parquet", "ZSTD"))[0])
    assert pq.read_table(tmp_path / "x") == table


def test_a_bomb_is_refused_before_it_is_inflated() -> None:
    container = Container.of("arrow", "ZSTD")
    content, chunks = written(container)
    bombs = tuple(chunk._replace(raw_size=1 << 62) if chunk.rows else chunk for chunk in chunks)
    reader = container.reader(OpenFile(io.BytesIO(content), None), "x", bombs)
    with pytest.raises(DataLossError, match="may have at most"):
        reader.read(0)


def test_a_stream_without_a_schema() -> None:
    content, chunks = written(Container.of("arrow", None))
    with pytest.raises(DataLossError, match="must begin with its schema"):
        Container.of("arrow", None).reader(OpenFile(io.BytesIO(content), None), "x", chunks[1:])


@pytest.mark.parametrize("arguments", [("arrow", "gzip"), ("arrow", "BROTLI"), ("csv", None), (None, None)])
def test_bad_arguments(arguments: tuple[Any, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="must be"):
        Container.of(*arguments)


def test_every_byte_belongs_to_a_chunk() -> None:
    file = io.BytesIO()
    writer = ChunkWriter(file, "x")
    assert [writer.write(part) for part in (b"head", b"er")] == [4, 2]
    writer.end_chunk(0)
    writer.end_chunk(0)
    writer.write(memoryview(b"rows"))
    writer.end_chunk(3, raw_size=9)
    assert writer.tell() == 10
    assert writer.chunks == [Chunk(0, 6, crc32c(b"header"), 0, 6), Chunk(6, 4, crc32c(b"rows"), 3, 9)]
    assert file.getvalue() == b"headerrows"


def test_chunks_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"headerrows")
    with path.open("rb") as file:
        assert read_chunk(file, str(path), Chunk(6, 4, crc32c(b"rows"), 3, 4)) == b"rows"
        with pytest.raises(DataLossError, match="3 elements must match") as caught:
            read_chunk(file, str(path), Chunk(5, 4, crc32c(b"rows"), 3, 4))
        assert (caught.value.path, caught.value.offset) == (str(path), 5)
        with pytest.raises(DataLossError, match="must have 9 bytes, but 5 of them are missing"):
            read_chunk(file, str(path), Chunk(6, 9, 0, 3, 9))
