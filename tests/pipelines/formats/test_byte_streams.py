from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.core.errors import DataLossError, InvalidArgumentError
from raydist.pipelines.formats.byte_streams import ByteStream, check_compression, open_stream
from tests.pipelines.formats.record_files import COMPRESS

# Compressible and not, and longer than the chunks that are read at once.
CONTENT = np.random.default_rng(0).bytes(150_000) + bytes(150_000) + b"the end"


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


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("size", [1000, 1 << 20])
def test_reads_everything(tmp_path: Path, compression: str | None, size: int) -> None:
    path = write(tmp_path, COMPRESS[compression](CONTENT))
    stream = open_stream(path, compression)
    bound = stream.bound()
    assert bound is not None
    assert bound >= len(CONTENT)
    assert drain(stream, size) == (CONTENT, None)


@pytest.mark.parametrize("compression", COMPRESS)
def test_skip(tmp_path: Path, compression: str | None) -> None:
    path = write(tmp_path, COMPRESS[compression](CONTENT))
    for start in (0, 1, 149_999, len(CONTENT)):
        stream = open_stream(path, compression)
        stream.skip(start)
        assert drain(stream) == (CONTENT[start:], None)
    stream = open_stream(path, compression)
    with pytest.raises(DataLossError, match=f"must reach byte {len(CONTENT) + 1}.* has {len(CONTENT)} bytes"):
        stream.skip(len(CONTENT) + 1)
    stream.close()


@pytest.mark.parametrize("compression", COMPRESS)
def test_an_empty_file_has_no_bytes(tmp_path: Path, compression: str | None) -> None:
    assert drain(open_stream(write(tmp_path, b""), compression)) == (b"", None)


def test_members_of_gzip_follow_each_other(tmp_path: Path) -> None:
    path = write(tmp_path, gzip.compress(CONTENT) + gzip.compress(b"") + gzip.compress(b"more"))
    assert drain(open_stream(path, "GZIP")) == (CONTENT + b"more", None)


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
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


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
@given(where=st.floats(0, 1, exclude_max=True))
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


@pytest.mark.parametrize(("compression", "junk"), [("GZIP", b"junk"), ("ZLIB", b"\x78\x9c"), ("GZIP", bytes(4))])
def test_nothing_may_follow_compressed_data(tmp_path: Path, compression: str, junk: bytes) -> None:
    whole = COMPRESS[compression](b"abc")
    path = write(tmp_path, whole + junk)
    data, error = drain(open_stream(path, compression))
    assert data == b"abc"
    assert error is not None
    assert error.offset == len(whole)
    assert "other bytes follow" in str(error)


def test_the_wrong_compression_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, b"plain text, not compressed")
    data, error = drain(open_stream(path, "GZIP"))
    assert data == b""
    assert "zlib reports 'incorrect header check'. Was the file written with compression_type='GZIP'?" in str(error)


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


def test_unknown_compression() -> None:
    with pytest.raises(InvalidArgumentError, match="must be None, 'GZIP' or 'ZLIB', got 'gzip'"):
        check_compression("gzip")
