from __future__ import annotations

import gzip
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from raydist.core.errors import DataLossError
from raydist.pipelines.formats import records as readers
from raydist.pipelines.formats.byte_streams import ByteStream, open_stream
from raydist.pipelines.formats.files import require_limit
from raydist.pipelines.formats.records import FixedRecordReader, LineReader
from tests.pipelines.formats.record_files import COMPRESS

# Compressible and not, and longer than the chunks that are read at once.
CONTENT = np.random.default_rng(0).bytes(150_000) + bytes(150_000) + b"the end"
PACKED = ["GZIP", "ZLIB"]


def drain(stream: ByteStream, size: int = 10_000) -> tuple[bytes, DataLossError | None]:
    """Everything that can be read, and the damage that ends it."""
    parts = []
    try:
        while data := stream.read(size):
            assert len(data) <= size
            parts.append(data)
    except DataLossError as error:
        with pytest.raises(DataLossError):  # it stays damaged
            stream.read(size)
        return b"".join(parts), error
    finally:
        stream.close()
    return b"".join(parts), None


def write(folder: Path, data: bytes) -> str:
    path = folder / "data.bin"
    path.write_bytes(data)
    return str(path)


def test_everything_is_read_from_any_byte_on(tmp_path: Path) -> None:
    for compression, compress in COMPRESS.items():
        path = write(tmp_path, compress(CONTENT))
        for size in (1000, 1 << 20):
            stream = open_stream(path, compression)
            bound = stream.bound()
            assert bound is not None
            assert bound >= len(CONTENT)
            assert drain(stream, size) == (CONTENT, None), compression
        for start in (0, 1, 149_999, len(CONTENT)):
            stream = open_stream(path, compression)
            stream.skip(start)
            assert drain(stream) == (CONTENT[start:], None), compression
        stream = open_stream(path, compression)
        with pytest.raises(DataLossError, match=f"must reach byte {len(CONTENT) + 1}.* has {len(CONTENT)} bytes"):
            stream.skip(len(CONTENT) + 1)
        stream.close()


def test_only_members_of_gzip_follow_each_other(tmp_path: Path) -> None:
    path = write(tmp_path, gzip.compress(CONTENT) + gzip.compress(b"") + gzip.compress(b"more"))
    assert drain(open_stream(path, "GZIP")) == (CONTENT + b"more", None)
    for compression, junk in (("GZIP", b"junk"), ("ZLIB", b"\x78\x9c"), ("GZIP", bytes(4))):
        whole = COMPRESS[compression](b"abc")
        data, error = drain(open_stream(write(tmp_path, whole + junk), compression))
        assert data == b"abc"
        assert error is not None
        assert error.offset == len(whole)
        assert "other bytes follow" in str(error)


@pytest.mark.parametrize("compression", PACKED)
def test_what_comes_before_the_end_of_a_truncated_file_is_read(tmp_path: Path, compression: str) -> None:
    whole = COMPRESS[compression](CONTENT)
    for length in (1, 5, 100, 70_000, len(whole) - 9, len(whole) - 1):
        path = write(tmp_path, whole[:length])
        data, error = drain(open_stream(path, compression))
        assert CONTENT.startswith(data)
        reference = zlib.decompressobj(31 if compression == "GZIP" else 15)
        assert data == reference.decompress(whole[:length])
        assert error is not None
        assert (error.path, error.offset) == (path, length)
        assert f"{compression} data must not end in the middle" in str(error)


@given(compression=st.sampled_from(PACKED), where=st.floats(0, 1, exclude_max=True))
def test_what_comes_before_damage_is_read(
    tmp_path_factory: pytest.TempPathFactory, compression: str, where: float
) -> None:
    whole = bytearray(COMPRESS[compression](CONTENT))
    at = int(where * len(whole))
    whole[at] ^= 0x10
    path = write(tmp_path_factory.mktemp("damage"), bytes(whole))
    data, error = drain(open_stream(path, compression))
    if error is None:  # a bit of the header that says nothing about the data
        assert data == CONTENT
        return
    assert error.path == path
    # The bytes before the flipped one decide all that was stored up to there.
    safe = zlib.decompressobj(31 if compression == "GZIP" else 15).decompress(bytes(whole[:at]))
    assert data.startswith(safe)


def test_a_file_that_shrinks_is_data_loss(tmp_path: Path) -> None:
    path = write(tmp_path, bytes(100))
    stream = open_stream(path, None)
    assert len(stream.read(50)) == 50
    Path(path).write_bytes(b"")
    data, error = drain(stream)
    assert data == b""
    assert "must keep its size while it is read, but 50 bytes have gone" in str(error)


def test_a_bomb_is_read_in_pieces(tmp_path: Path) -> None:
    path = write(tmp_path, gzip.compress(bytes(50 << 20)))
    stream = open_stream(path, "GZIP")
    assert len(stream.read(1000)) == 1000
    assert len(stream._ready) == 0  # type: ignore[attr-defined]  # nothing beyond what was asked for is held
    stream.close()


@given(
    num=st.integers(0, 5),
    sizes=st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(0, 6)),
    chunk=st.integers(1, 7),
    limit=st.integers(1, 4),
    extra=st.integers(0, 1),
)
def test_records_between_header_and_footer(
    tmp_path_factory: pytest.TempPathFactory,
    num: int,
    sizes: tuple[int, int, int],
    chunk: int,
    limit: int,
    extra: int,
) -> None:
    record, header, footer = sizes
    path = tmp_path_factory.mktemp("records") / "x"
    records = [bytes([65 + i]) * record for i in range(num)]
    path.write_bytes(b"h" * header + b"".join(records) + b"f" * (footer + extra))
    found: list[bytes] = []
    error = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "CHUNK_BYTES", chunk)
        reader = FixedRecordReader(open_stream(str(path), None), *sizes)
        while not reader.ended:
            part, error = reader.read(limit)
            found += part
        reader.close()
    if extra and record == 1:  # nothing tells the extra byte from a record
        records.append(found[-1])
    assert found == records
    assert (error is None) == (not extra or record == 1)
    if error is not None:
        assert isinstance(error, rd.DataLossError)
        assert error.offset == header + num * record
        assert f"{footer + 1} bytes are left" in str(error)


def read_all(path: Path, limit: int = 3, **options: int) -> tuple[list[bytes], list[int], Exception | None]:
    reader = LineReader(open_stream(str(path), None), **options)
    found: list[bytes] = []
    starts: list[int] = []
    error = None
    while not reader.ended:
        part, error = reader.read(limit)
        found += part
        starts += reader.starts
    reader.close()
    return found, starts, error


@given(content=st.text("ab\r\n", max_size=40).map(str.encode), chunk=st.integers(1, 5))
def test_lines_and_their_offsets(tmp_path_factory: pytest.TempPathFactory, content: bytes, chunk: int) -> None:
    path = tmp_path_factory.mktemp("lines") / "x"
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "CHUNK_BYTES", chunk)
        found, starts, error = read_all(path)
    ends = [line.endswith(b"\n") for line in content.split(b"\n")]
    assert not any(ends)
    *whole, last = content.split(b"\n")
    assert found == [line.removesuffix(b"\r") for line in whole] + ([last] if last else [])
    assert error is None
    assert all(content[start:].startswith(line) for start, line in zip(starts, found, strict=True))
    assert all(start == 0 or content[start - 1 : start] == b"\n" for start in starts)


def test_a_line_without_end_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"short\n" + b"x" * 600_000)
    found, _, error = read_all(path, max_line_bytes=500_000)
    assert found == [b"short"]
    assert isinstance(error, rd.DataLossError)
    assert "at most 500000 bytes, but line 1 has more" in str(error)
    assert error.offset == 6


def test_a_compressed_line_stays_small(tmp_path: Path) -> None:
    """A line of 100 MB in 100 KB: one of a small file may have 32 MiB, unless a user allows more."""
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b"first\n" + bytes(100 << 20), 1))
    reader = LineReader(open_stream(str(path), "GZIP"))
    tracemalloc.start()
    lines, error = reader.read(10)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert lines == [b"first"]
    assert isinstance(error, rd.DataLossError)
    assert "at most 33554432 bytes, but line 1 has more" in str(error)
    assert (error.path, error.offset) == (str(path), 6)
    assert peak_bytes < 48 << 20
    allowed = LineReader(open_stream(str(path), "GZIP"), max_line_bytes=1 << 27)
    assert [len(line) for line in allowed.read(10)[0]] == [5, 100 << 20]
    with pytest.raises(rd.InvalidArgumentError, match="max_line_bytes must be >= 1"):
        require_limit("max_line_bytes", 0)
