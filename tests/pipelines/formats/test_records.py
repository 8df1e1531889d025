from __future__ import annotations

import gzip
import pickle
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from raydist.pipelines.formats import records as readers
from raydist.pipelines.formats.byte_streams import open_stream
from raydist.pipelines.formats.files import require_limit
from raydist.pipelines.formats.records import FixedRecordReader, LineReader
from raydist.pipelines.sources.csv_files import CsvParser
from raydist.pipelines.sources.json_files import JsonParser
from raydist.pipelines.sources.row_lines import LineParser


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


def test_a_line_in_pieces_is_put_together(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"a" * 600_000 + b"\n" + b"b" * 300_000 + b"\r\nc")
    found, starts, _ = read_all(path)
    assert (found, starts) == ([b"a" * 600_000, b"b" * 300_000, b"c"], [0, 600_001, 900_003])


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


SCHEMA = pa.schema({"x": pa.int64()})


@pytest.mark.parametrize(
    ("parser", "lines"), [(CsvParser(SCHEMA, ("x",)), [b"1", b"2"]), (JsonParser(SCHEMA), [b'{"x": 1}', b'{"x": 2}'])]
)
def test_one_row_a_line(parser: LineParser, lines: list[bytes]) -> None:
    copied = pickle.loads(pickle.dumps(parser))
    batch = copied.parse(lines)
    assert batch.schema == parser.schema == SCHEMA
    assert batch.to_pydict() == {"x": [1, 2]}
    with pytest.raises(pa.ArrowInvalid):
        parser.parse([b"[not a row"])
