from __future__ import annotations

import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.core.errors import DataLossError, FailedPreconditionError, InvalidArgumentError, NotFoundError, SpecError
from raydist.pipelines.formats.tfrecord import (
    MAX_RECORD_BYTES,
    TFRecordOptions,
    TFRecordWriter,
    frame,
    masked_crc32c,
)
from tests.pipelines.formats.record_files import COMPRESS, crc32c, framed, masked, read_all

# A file of the records b"a" and b"", by hand: lengths, checksums, data. CRC-32C("a") is 0xc1d04330.
BY_HAND = bytes.fromhex("0100000000000000 0175de41 61 786ee4280000000000000000 29039807 d8ea82a2")
RECORDS = [b"a", b"", b"bc" * 300, bytes(range(256)), b"last"]


@pytest.mark.parametrize(
    ("data", "crc"),
    [  # RFC 3720, appendix B.4
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"123456789", 0xE3069283),
    ],
)
def test_crc_of_known_data(data: bytes, crc: int) -> None:
    assert crc32c(data) == crc
    assert masked_crc32c(data).to_bytes(4, "little") == masked(data)


def test_bytes_by_hand(tmp_path: Path) -> None:
    assert crc32c(b"a") == 0xC1D04330
    assert frame(b"a") + frame(b"") == BY_HAND
    path = tmp_path / "x.tfrecord"
    path.write_bytes(BY_HAND)
    assert read_all(path) == ([b"a", b""], [])


@given(st.binary(max_size=300))
def test_frame_is_the_definition(record: bytes) -> None:
    assert frame(record) == framed(record)
    assert len(frame(record)) == len(record) + 16


def test_records_larger_than_the_buffer(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    large = random.Random(0).randbytes(3 << 20)
    path.write_bytes(b"".join(frame(r) for r in (b"first", large, b"", large[:300_000], b"last")))
    assert read_all(path) == ([b"first", large, b"", large[:300_000], b"last"], [])


def test_damaged_data_costs_one_record(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    content = bytearray(framed(*RECORDS))
    at = len(framed(*RECORDS[:2]))
    content[at + 12] ^= 1
    path.write_bytes(content)
    records, (error,) = read_all(path)
    assert records == RECORDS[:2] + RECORDS[3:]
    assert str(error) == (
        f"The checksum of a record's data must match: record 2 is damaged (file {str(path)!r}, byte {at})."
    )


def test_a_damaged_length_hides_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    content = bytearray(framed(*RECORDS))
    at = len(framed(*RECORDS[:2]))
    content[at] ^= 1
    path.write_bytes(content)
    records, (error,) = read_all(path)
    assert records == RECORDS[:2]
    assert str(error) == (
        f"The checksum of a record's length must match: record 2 is damaged (file {str(path)!r}, byte {at})."
    )


@pytest.mark.parametrize("compression", COMPRESS)
def test_truncated_anywhere(tmp_path: Path, compression: str | None) -> None:
    path = tmp_path / "x.tfrecord"
    whole = framed(b"first", b"second")
    for length in range(len(whole)):
        path.write_bytes(COMPRESS[compression](whole[:length]))
        records, errors = read_all(path, compression)
        assert records == ([b"first"] if length >= len(framed(b"first")) else [])
        if length in (0, len(framed(b"first"))):
            assert errors == []
            continue
        (error,) = errors
        assert isinstance(error, DataLossError)
        assert (error.path, error.offset) == (str(path), len(framed(b"first")) if records else 0)


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("good_crc", [True, False])
@pytest.mark.parametrize("length", [0, 1, 2**31, 2**32, 2**62, 2**63, 2**64 - 1])
def test_lengths_that_lie(tmp_path: Path, compression: str | None, good_crc: bool, length: int) -> None:
    path = tmp_path / "x.tfrecord"
    stated = length.to_bytes(8, "little")
    crc = masked(stated) if good_crc else bytes(4)
    path.write_bytes(COMPRESS[compression](framed(b"good") + stated + crc + b"data of some other length"))
    tracemalloc.start()
    try:
        records, errors = read_all(path, compression)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert records == [b"good"]
    assert errors
    assert all(isinstance(error, DataLossError) for error in errors)
    assert isinstance(errors[0], DataLossError)
    assert errors[0].offset == len(framed(b"good"))
    assert peak_bytes < 4 << 20


def test_limit_of_a_record(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    path.write_bytes(framed(b"1234", b"12345"))
    records, (error,) = read_all(path, max_record_bytes=4)
    assert records == [b"1234"]
    assert "at most 4 bytes, got 5. Raise max_record_bytes if the file is right" in str(error)
    assert MAX_RECORD_BYTES == 2**30


@pytest.mark.parametrize(("options", "limit"), [({"max_record_bytes": 1 << 20}, 1 << 20), ({}, 1 << 25)])
def test_a_compressed_bomb_stays_small(tmp_path: Path, options: dict[str, int], limit: int) -> None:
    """A header that is right, and behind it 60 MB of zeros in 60 KB."""
    path = tmp_path / "x.tfrecord"
    stated = (60 << 20).to_bytes(8, "little")
    path.write_bytes(COMPRESS["GZIP"](stated + masked(stated) + bytes(60 << 20)))
    tracemalloc.start()
    records, (error,) = read_all(path, "GZIP", **options)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert records == []
    assert f"at most {limit} bytes, got 62914560" in str(error)
    assert peak_bytes < 8 << 20


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_a_compressed_file_read_as_plain_is_recognised(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "x.tfrecord"
    path.write_bytes(COMPRESS[compression](framed(*RECORDS)))
    records, (error,) = read_all(path)
    assert records == []
    assert f"the file looks compressed: try compression_type={compression!r}" in str(error)


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
def test_which_cuts_are_noticed(tmp_path: Path, compression: str | None) -> None:
    """All but those of a plain file exactly between two records: the format says nowhere how many there are.

    A compressed file of no bytes counts as one without records, as in TensorFlow.
    """
    records = [b"x" * size for size in (0, 3, 40)]
    content = COMPRESS[compression](framed(*records))
    borders = [sum(len(record) + 16 for record in records[:count]) for count in range(len(records) + 1)]
    unnoticed = []
    for size in range(len(content)):
        (tmp_path / "x").write_bytes(content[:size])
        if not read_all(tmp_path / "x", compression)[1]:
            unnoticed.append(size)
    assert unnoticed == (borders[:-1] if compression is None else [0])


@pytest.mark.parametrize("compression", COMPRESS)
@given(records=st.lists(st.binary(max_size=200), max_size=20))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, compression: str | None, records: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("records") / "x.tfrecord"
    with TFRecordWriter(path, compression) as writer:
        for record in records:
            writer.write(record)
    assert read_all(path, compression) == (records, [])


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


@pytest.mark.parametrize("record", ["text", 3, None, ["a"]])
def test_a_record_is_bytes(tmp_path: Path, record: object) -> None:
    with (
        TFRecordWriter(tmp_path / "x") as writer,
        pytest.raises(SpecError, match=f"A record must be bytes, got {type(record).__name__}. Encode text"),
    ):
        writer.write(record)  # type: ignore[arg-type]  # the point of the test


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


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_killed_writer_leaves_whole_records(tmp_path: Path, compression: str | None) -> None:
    path = tmp_path / "x.tfrecord"
    code = (
        "import os, sys; from raydist.pipelines.formats.tfrecord import TFRecordWriter\n"
        f"writer = TFRecordWriter({str(path)!r}, {compression!r})\n"
        "for i in range(1000): writer.write(b'%d' % i * 100)\n"
        "writer.flush(); writer.write(b'lost or torn' * 10000); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    records, errors = read_all(path, compression)
    assert records[:1000] == [b"%d" % i * 100 for i in range(1000)]
    assert len(records) + len(errors) <= 1001 + (len(records) > 1000)
