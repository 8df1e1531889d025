"""Compressed streams, lines, records of one size, and TFRecords."""

from __future__ import annotations

import gzip
import itertools
import os
import random
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from raydist.core.errors import DataLossError, FailedPreconditionError, InvalidArgumentError, NotFoundError, SpecError
from raydist.pipelines.formats import records as readers
from raydist.pipelines.formats.byte_streams import ByteStream, open_stream
from raydist.pipelines.formats.files import require_limit
from raydist.pipelines.formats.records import FixedRecordReader, LineReader
from raydist.pipelines.formats.tfrecord import MAX_RECORD_BYTES, TFRecordOptions, TFRecordWriter, frame, masked_crc32c
from tests.pipelines.formats.record_files import COMPRESS, crc32c, framed, masked, read_all

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


def test_what_comes_before_damage_in_the_middle_is_read(tmp_path: Path) -> None:
    for compression, bits in (("GZIP", 31), ("ZLIB", 15)):
        deflater = zlib.compressobj(wbits=bits)
        whole = deflater.compress(CONTENT[:3000]) + deflater.flush(zlib.Z_SYNC_FLUSH)
        data, error = drain(open_stream(write(tmp_path, whole + b"\xff" * 50), compression))
        assert data == CONTENT[:3000]
        assert "data must be intact, but zlib reports 'invalid block type'" in str(error)


def test_a_bomb_is_read_in_pieces(tmp_path: Path) -> None:
    path = write(tmp_path, gzip.compress(bytes(50 << 20)))
    stream = open_stream(path, "GZIP")
    assert len(stream.read(1000)) == 1000
    assert len(stream._ready) == 0  # type: ignore[attr-defined]  # nothing beyond what was asked for is held
    stream.close()
    assert path not in [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]


@given(
    num=st.integers(0, 5),
    sizes=st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(0, 6)),
    chunk=st.integers(1, 7),
    limit=st.integers(1, 4),
    extra=st.integers(0, 1),
)
def test_records_between_header_and_footer(
    tmp_path_factory: pytest.TempPathFactory, num: int, sizes: tuple[int, int, int], chunk: int, limit: int, extra: int
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
        assert f"{footer + 1} bytes follow {num} whole records" in str(error)


def read_lines(path: Path, limit: int = 3, **options: int) -> tuple[list[bytes], list[int], Exception | None]:
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
        found, starts, error = read_lines(path)
    ends = [line.endswith(b"\n") for line in content.split(b"\n")]
    assert not any(ends)
    *whole, last = content.split(b"\n")
    assert found == [line.removesuffix(b"\r") for line in whole] + ([last] if last else [])
    assert error is None
    assert all(content[start:].startswith(line) for start, line in zip(starts, found, strict=True))
    assert all(start == 0 or content[start - 1 : start] == b"\n" for start in starts)


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


# A file of the records b"a" and b"", by hand: lengths, checksums, data. CRC-32C("a") is 0xc1d04330.
BY_HAND = bytes.fromhex("0100000000000000 0175de41 61 786ee4280000000000000000 29039807 d8ea82a2")


def test_bytes_by_hand(tmp_path: Path) -> None:
    known = [  # RFC 3720, appendix B.4
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"123456789", 0xE3069283),
        (b"a", 0xC1D04330),
    ]
    for data, crc in known:
        assert crc32c(data) == crc
        assert masked_crc32c(data).to_bytes(4, "little") == masked(data)
    assert frame(b"a") + frame(b"") == BY_HAND
    path = tmp_path / "x.tfrecord"
    path.write_bytes(BY_HAND)
    assert read_all(path) == ([b"a", b""], [])


def test_records_larger_than_the_buffer(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    large = random.Random(0).randbytes(3 << 20)
    path.write_bytes(b"".join(frame(r) for r in (b"first", large, b"", large[:300_000], b"last")))
    assert read_all(path) == ([b"first", large, b"", large[:300_000], b"last"], [])
    for cut in (path.read_bytes()[: 2 << 20], framed(b"first", b"second")[:-3]):
        path.write_bytes(gzip.compress(cut, 1))  # of which nobody knows how much there is
        records, (error,) = read_all(path, "GZIP")
        assert records == [b"first"]
        assert "A record must be complete, but the file ends inside it" in str(error)


def test_lengths_that_lie(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    tracemalloc.start()
    for length, good_crc in itertools.product((0, 1, 2**31, 2**32, 2**62, 2**63, 2**64 - 1), (True, False)):
        stated = length.to_bytes(8, "little")
        crc = masked(stated) if good_crc else bytes(4)
        for compression, compress in COMPRESS.items():
            path.write_bytes(compress(framed(b"good") + stated + crc + b"data of some other length"))
            records, errors = read_all(path, compression)
            assert records == [b"good"]
            assert errors
            assert all(isinstance(error, DataLossError) for error in errors), (length, good_crc, compression)
            assert getattr(errors[0], "offset", None) == len(framed(b"good"))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4 << 20


def test_limit_of_a_record(tmp_path: Path) -> None:
    """Also of a compressed bomb: a header that is right, and behind it 60 MB of zeros in 60 KB."""
    path = tmp_path / "x.tfrecord"
    path.write_bytes(framed(b"1234", b"12345"))
    records, (error,) = read_all(path, max_record_bytes=4)
    assert records == [b"1234"]
    assert "at most 4 bytes, got 5. Raise max_record_bytes if the file is right" in str(error)
    assert MAX_RECORD_BYTES == 2**30
    stated = (60 << 20).to_bytes(8, "little")
    path.write_bytes(COMPRESS["GZIP"](stated + masked(stated) + bytes(60 << 20)))
    for options, limit in (({"max_record_bytes": 1 << 20}, 1 << 20), ({}, 1 << 25)):
        tracemalloc.start()
        records, (error,) = read_all(path, "GZIP", **options)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert records == []
        assert f"at most {limit} bytes, got 62914560" in str(error)
        assert peak_bytes < 8 << 20


def test_an_error_in_the_block_closes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    with pytest.raises(KeyError), TFRecordWriter(path) as writer:  # noqa: PT012 - the block is what is tested
        writer.write(b"kept")
        raise KeyError
    with pytest.raises(FailedPreconditionError, match=f"must be open to write, but that of {str(path)!r} is closed"):
        writer.write(b"more")
    with pytest.raises(FailedPreconditionError):
        writer.flush()
    assert read_all(path) == ([b"kept"], [])


def test_a_level_says_how_small_a_file_is(tmp_path: Path) -> None:
    sizes = []
    for level in (0, 9):
        with TFRecordWriter(tmp_path / "x", TFRecordOptions("GZIP", level)) as writer:
            writer.write(bytes(1000))
        sizes.append((tmp_path / "x").stat().st_size)
        assert read_all(tmp_path / "x", "GZIP") == ([bytes(1000)], [])
    assert sizes[0] > 1000 > sizes[1]


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="compression_type must be None, 'GZIP' or 'ZLIB', got 'LZ4'"):
        TFRecordWriter(tmp_path / "x", "LZ4")
    with pytest.raises(InvalidArgumentError, match=r"compression_level must be 0 \.\. 9 or None, got 10"):
        TFRecordOptions("GZIP", 10)
    with pytest.raises(InvalidArgumentError, match="is a directory"):
        TFRecordWriter(tmp_path)
    with pytest.raises(NotFoundError):
        TFRecordWriter(tmp_path / "nowhere" / "x")
    assert list(tmp_path.iterdir()) == []
    records: list[Any] = ["text", 3, None, ["a"]]
    with TFRecordWriter(tmp_path / "x") as writer:
        for record in records:
            with pytest.raises(SpecError, match=f"must be bytes, got {type(record).__name__}. Encode text"):
                writer.write(record)


def test_a_killed_writer_leaves_whole_records(tmp_path: Path) -> None:
    code = (
        "import os, sys; from raydist.pipelines.formats.tfrecord import TFRecordWriter\n"
        f"writers = [TFRecordWriter(f'{tmp_path}/{{kind}}', kind) for kind in (None, 'GZIP', 'ZLIB')]\n"
        "for writer in writers:\n"
        "    for i in range(1000): writer.write(b'%d' % i * 100)\n"
        "    writer.flush(); writer.write(b'lost or torn' * 10000)\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    for compression in COMPRESS:
        records, errors = read_all(tmp_path / str(compression), compression)
        assert records[:1000] == [b"%d" % i * 100 for i in range(1000)]
        assert len(records) + len(errors) <= 1001 + (len(records) > 1000)
