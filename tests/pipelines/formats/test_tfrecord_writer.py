from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, SpecError
from raydist.pipelines.formats.tfrecord_writer import TFRecordOptions, TFRecordWriter
from tests.pipelines.formats.record_files import COMPRESS, framed, read_all


@pytest.mark.parametrize("compression", COMPRESS)
@given(records=st.lists(st.binary(max_size=200), max_size=20))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, compression: str | None, records: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("records") / "x.tfrecord"
    with TFRecordWriter(path, compression) as writer:
        for record in records:
            writer.write(record)
    assert read_all(path, compression) == (records, [])


def test_bytes_are_the_format(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    with TFRecordWriter(str(path)) as writer:
        writer.write(b"one")
        writer.write(bytearray(b"two"))
        writer.write(memoryview(b"three"))
    assert path.read_bytes() == framed(b"one", b"two", b"three")


@pytest.mark.parametrize("compression", COMPRESS)
def test_flush_shows_what_was_written(tmp_path: Path, compression: str | None) -> None:
    path = tmp_path / "x.tfrecord"
    writer = TFRecordWriter(path, TFRecordOptions(compression, 9 if compression else None))
    writer.write(b"first")
    writer.flush()
    records, _ = read_all(path, compression)
    assert records == [b"first"]
    writer.close()
    writer.close()
    assert read_all(path, compression) == ([b"first"], [])


def test_without_records_the_file_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    TFRecordWriter(path).close()
    assert path.read_bytes() == b""


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


def test_writes_a_uri() -> None:
    with TFRecordWriter("memory://out/x.tfrecord", "GZIP") as writer:
        writer.write(b"abc")
    assert fsspec.open("memory://out/x.tfrecord").open().read(2) == b"\x1f\x8b"
    fsspec.filesystem("memory").rm("/out", recursive=True)


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
        "import os, sys; from raydist.pipelines.formats.tfrecord_writer import TFRecordWriter\n"
        f"writer = TFRecordWriter({str(path)!r}, {compression!r})\n"
        "for i in range(1000): writer.write(b'%d' % i * 100)\n"
        "writer.flush(); writer.write(b'lost or torn' * 10000); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    records, errors = read_all(path, compression)
    assert records[:1000] == [b"%d" % i * 100 for i in range(1000)]
    assert len(records) + len(errors) <= 1001 + (len(records) > 1000)
