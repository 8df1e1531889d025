from __future__ import annotations

import pickle
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from raydist.pipelines.formats import lines as lines_module
from raydist.pipelines.formats.byte_streams import open_stream
from raydist.pipelines.formats.csv_lines import CsvParser
from raydist.pipelines.formats.json_lines import JsonParser
from raydist.pipelines.formats.lines import LineParser, LineReader


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
        patch.setattr(lines_module, "_CHUNK_BYTES", chunk)
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
