from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pytest

import raydist as rd
from raydist.pipelines.sources import columnar_files
from tests.contracts.op import check_op, collect, iterate, same
from tests.pipelines.sources.damage import report_damage


def table(start: int, rows: int) -> pa.Table:
    numbers = range(start, start + rows)
    return pa.table(
        {
            "x": pa.array(numbers, pa.int64()),
            "l": pa.array([[0.5] * (i % 3) for i in numbers], pa.list_(pa.float32())),
            "s": pa.array([f"text {i}" for i in numbers], pa.string()),
            "d": pa.array([f"{i % 2}" for i in numbers], pa.string()).dictionary_encode(),
        }
    )


def write(path: Path, content: pa.Table, rows: int = 5, compression: str | None = None) -> str:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(path, content.schema, options=options) as writer:
        for batch in content.to_batches(max_chunksize=rows):
            writer.write_batch(batch)
    return str(path)


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_rows_of_files(tmp_path: Path, compression: str | None) -> None:
    paths = [write(tmp_path / f"{i}", table(i * 9, rows), 4, compression) for i, rows in enumerate([9, 0, 3])]
    dataset = rd.Dataset.from_arrow(paths)
    expected = [
        *collect(iterate(rd.Dataset.from_arrow(table(0, 9)))),
        *collect(iterate(rd.Dataset.from_arrow(table(18, 3)))),
    ]
    assert same(collect(iterate(dataset)), expected)
    assert dataset.cardinality() == rd.UNKNOWN_CARDINALITY
    assert f"from_arrow({paths[0]!r} and 2 more)" in dataset.explain()
    if compression is None:
        check_op(lambda: rd.Dataset.from_arrow(paths))


def test_feather_is_the_same_format(tmp_path: Path) -> None:
    feather.write_feather(table(0, 4), str(tmp_path / "new"))
    assert [int(row["x"]) for row in rd.Dataset.from_arrow(tmp_path / "new")] == [0, 1, 2, 3]
    (tmp_path / "old").write_bytes(b"FEA1 as version 1 begins")
    with pytest.raises(rd.DataLossError, match="must begin with b'ARROW1', got b'FEA1.*version 1 is another format"):
        rd.Dataset.from_arrow(tmp_path / "old")


def test_record_batches_are_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnar_files, "_SPLIT_BYTES", 1)
    path = write(tmp_path / "x", table(0, 12))
    assert "3 pieces of files" in rd.Dataset.from_arrow(path).explain()
    check_op(lambda: rd.Dataset.from_arrow([path, path]).batch(7))


def test_a_null_is_the_error_of_its_row(tmp_path: Path) -> None:
    path = write(tmp_path / "x", pa.table({"x": [0, None, 2]}))
    found = collect(iterate(rd.Dataset.from_arrow(path)))
    assert (int(found[0]["x"]), found[1][0], int(found[2]["x"])) == (0, "SpecError", 2)
    assert f"column 'x' has one in row 1 of record batch 0 of file {path!r}. Give fill_null=" in found[1][1]
    assert [int(row["x"]) for row in rd.Dataset.from_arrow(path, fill_null=-1)] == [0, -1, 2]


def test_files_that_changed_since(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, table(0, 12)) for name in "abc"]
    dataset = rd.Dataset.from_arrow(paths)
    (tmp_path / "a").unlink()
    write(tmp_path / "b", table(0, 3))
    write(tmp_path / "c", pa.table({"other": [1]}))
    kinds = [item[0] for item in collect(iterate(dataset))]
    assert kinds == ["NotFoundError", "DataLossError", "SpecError"]


def test_bad_arguments(tmp_path: Path) -> None:
    path = write(tmp_path / "x", table(0, 2))
    (tmp_path / "text").write_text("no Arrow file")
    cases: list[tuple[Any, type[Exception], str]] = [
        (str(tmp_path / "missing"), rd.NotFoundError, "must exist"),
        (tmp_path, rd.InvalidArgumentError, "is a directory"),
        ([], rd.InvalidArgumentError, "from_arrow needs at least one path"),
        ([path, 3], rd.SpecError, "from_arrow needs a pyarrow Table"),
        (tmp_path / "text", rd.DataLossError, "must begin with b'ARROW1', got b'no Arr'"),
        (
            [path, write(tmp_path / "y", pa.table({"x": [1.0]}))],
            rd.SpecError,
            "All files must have the columns x: int64",
        ),
        (write(tmp_path / "z", pa.table({"d": pa.nulls(1)})), rd.SpecError, "Column 'd' must hold"),
    ]
    for source, kind, message in cases:
        with pytest.raises(kind, match=message):
            rd.Dataset.from_arrow(source)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_200_mutations_never_crash(tmp_path: Path, compression: str | None) -> None:
    content = Path(write(tmp_path / "x", table(0, 40), 8, compression)).read_bytes()
    report = report_damage(tmp_path, "from_arrow", content, 200)
    assert report.kinds <= {"DataLossError", "SpecError", "same", "other"}  # no checksums: values may be others
    assert report.count("DataLossError") > 60
    assert report.unnamed == []
