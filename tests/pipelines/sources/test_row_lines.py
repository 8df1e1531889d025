from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import raydist as rd
from raydist.pipelines.sources.json_files import JsonParser
from raydist.pipelines.sources.row_lines import RowLinesFormat, first_lines
from tests.pipelines.formats.record_files import COMPRESS


def test_first_lines(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"a\n \t\n\nb\n" + b"c\n" * 2000)
    assert first_lines(str(path), None)[:3] == [b"a", b"b", b"c"]
    assert len(first_lines(str(path), None)) == 998
    path.write_bytes(COMPRESS["GZIP"](b"a\n" * 9)[:-8])
    assert first_lines(str(path), "GZIP") == [b"a"] * 9
    path.write_bytes(b"")
    assert first_lines(str(path), None) == []


def test_goes_on_at_a_position(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"".join(b'{"x": %d}\n' % i for i in range(200)))
    table_format = RowLinesFormat("from_json", JsonParser(pa.schema({"x": pa.int64()})))
    assert (table_format.name, table_format.spec) == ("from_json", {"x": rd.TensorSpec((), "int64")})
    first = table_format.open(str(path), ())
    assert sum(item.num_rows for item in first.read(3) if not hasattr(item, "error")) == 64
    second = table_format.open(str(path), first.position())
    (block,) = second.read(70)
    assert not hasattr(block, "error")
    assert block.columns[0].tolist() == list(range(64, 134))
    first.close()
    second.close()


def test_a_position_behind_the_end(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"{}")
    table_format = RowLinesFormat("from_json", JsonParser(pa.schema({"x": pa.int64()})))
    with pytest.raises(rd.DataLossError, match="must reach byte 30"):
        table_format.open(str(tmp_path / "x"), [30, 3])
