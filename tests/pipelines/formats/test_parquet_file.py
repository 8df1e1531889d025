from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import raydist as rd
from raydist.pipelines.formats import parquet_file
from raydist.pipelines.formats.parquet_file import ParquetFile, parquet_errors


@pytest.fixture
def file(tmp_path: Path) -> ParquetFile:
    pq.write_table(pa.table({"x": range(10), "y": ["a"] * 10}), tmp_path / "x", row_group_size=4)
    return ParquetFile(str(tmp_path / "x"))


def test_footer(file: ParquetFile) -> None:
    assert (file.num_rows, file.num_row_groups, file.schema.names) == (10, 3, ["x", "y"])
    file.close()
    file.close()


def test_row_groups(file: ParquetFile, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [batch.to_pydict() for batch in file.batches(2, ["x"], None)] == [{"x": [8, 9]}]
    assert [batch.to_pydict() for batch in file.batches(1, ["x"], pc.field("x") > 6)] == [{"x": [7]}]
    assert list(file.batches(0, ["x"], pc.field("x") > 6)) == []
    monkeypatch.setattr(parquet_file, "_MAX_BATCH_ROWS", 3)
    assert [batch.num_rows for batch in file.batches(0, ["y"], None)] == [3, 1]
    file.close()


def test_a_filter_that_does_not_fit(file: ParquetFile) -> None:
    file.check(["x"], pc.field("y") == "a")
    with pytest.raises(pa.ArrowInvalid):
        file.check(["x"], pc.field("z") == "a")
    file.close()


def test_which_errors_are_damage() -> None:
    for damage in (
        pa.ArrowInvalid("bad"),
        OSError("thrift"),
        MemoryError("2 EB"),
        UnicodeDecodeError("utf8", b"", 0, 1, "x"),
    ):
        with pytest.raises(rd.DataLossError, match="must be an intact Parquet file") as caught, parquet_errors("p", 7):
            raise damage
        assert (caught.value.path, caught.value.offset) == ("p", 7)
    with pytest.raises(OSError, match="disk") as other, parquet_errors("p", 7):
        raise OSError(5, "disk")
    assert not isinstance(other.value, rd.RaydistError)
    with pytest.raises(KeyError), parquet_errors("p", 7):
        raise KeyError("x")
