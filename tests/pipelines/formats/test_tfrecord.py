from __future__ import annotations

import itertools
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

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


@given(st.binary(max_size=300))
def test_frame_is_the_definition(record: bytes) -> None:
    assert frame(record) == framed(record)
    assert len(frame(record)) == len(record) + 16


def test_records_larger_than_the_buffer(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    large = random.Random(0).randbytes(3 << 20)
    path.write_bytes(b"".join(frame(r) for r in (b"first", large, b"", large[:300_000], b"last")))
    assert read_all(path) == ([b"first", large, b"", large[:300_000], b"last"], [])


def test_damaged_data_costs_one_record_and_a_damaged_length_hides_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    at = len(framed(*RECORDS[:2]))
    for place, what, left in ((12, "data", RECORDS[3:]), (0, "length", [])):
        content = bytearray(framed(*RECORDS))
        content[at + place] ^= 1
        path.write_bytes(content)
        records, (error,) = read_all(path)
        assert records == RECORDS[:2] + left
        assert str(error) == (
            f"The checksum of a record's {what} must match: record 2 is damaged (file {str(path)!r}, byte {at})."
        )


def test_truncated_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    whole, first = framed(b"first", b"second"), len(framed(b"first"))
    for compression, compress in COMPRESS.items():
        for length in range(len(whole)):
            path.write_bytes(compress(whole[:length]))
            records, errors = read_all(path, compression)
            assert records == ([b"first"] if length >= first else [])
            if length in (0, first):
                assert errors == []
                continue
            (error,) = errors
            assert isinstance(error, DataLossError)
            assert (error.path, error.offset) == (str(path), first if records else 0)


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


def test_which_cuts_are_noticed(tmp_path: Path) -> None:
    """All but those of a plain file exactly between two records: the format says nowhere how many there are.

    A compressed file of no bytes counts as one without records, as in TensorFlow.
    """
    path = tmp_path / "x.tfrecord"
    records = [b"x" * size for size in (0, 3, 40)]
    borders = [sum(len(record) + 16 for record in records[:count]) for count in range(len(records) + 1)]
    for compression, compress in COMPRESS.items():
        content = compress(framed(*records))
        if compression is not None:
            path.write_bytes(content)
            found, (error,) = read_all(path)
            assert found == []
            assert f"the file looks compressed: try compression_type={compression!r}" in str(error)
        unnoticed = []
        for size in range(len(content)):
            path.write_bytes(content[:size])
            if not read_all(path, compression)[1]:
                unnoticed.append(size)
        assert unnoticed == (borders[:-1] if compression is None else [0]), compression


@given(compression=st.sampled_from([*COMPRESS]), records=st.lists(st.binary(max_size=200), max_size=20))
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
