from __future__ import annotations

import io
from pathlib import Path

import pytest

from raydist.errors import DataLossError
from raydist.pipelines.stored.chunks import Chunk, ChunkWriter, crc32c, read_chunk


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
