from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

import raydist as rd
from raydist.pipelines.sources import columnar_files
from raydist.pipelines.sources.columnar_files import ParquetFormat
from tests.contracts.op import check_op, collect, is_error, iterate, same


def write_arrow(path: Path, content: pa.Table, rows: int = 5, compression: str | None = None) -> str:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(path, content.schema, options=options) as writer:
        for batch in content.to_batches(max_chunksize=rows):
            writer.write_batch(batch)
    return str(path)


def test_rows_of_arrow_files(tmp_path: Path) -> None:
    expected = collect(iterate(rd.Dataset.from_arrow(pa.concat_tables([table(0, 9), table(18, 3)]))))
    for compression in ("lz4", "zstd", None):
        parts = [table(0, 9), table().slice(0, 0), table(18, 3)]
        paths = [write_arrow(tmp_path / f"{i}", part, 4, compression) for i, part in enumerate(parts)]
        dataset = rd.Dataset.from_arrow(paths)
        assert same(collect(iterate(dataset)), expected), compression
        assert dataset.cardinality() == rd.UNKNOWN_CARDINALITY
    assert f"from_arrow({paths[0]!r} and 2 more)" in dataset.explain()
    feather.write_feather(table(0, 4), str(tmp_path / "new"))
    assert [int(row["x"]) for row in rd.Dataset.from_arrow(tmp_path / "new")] == [0, 1, 2, 3]
    (tmp_path / "old").write_bytes(b"FEA1 as version 1 begins")
    with pytest.raises(rd.DataLossError, match="must begin with b'ARROW1', got b'FEA1.*version 1 is another format"):
        rd.Dataset.from_arrow(tmp_path / "old")


def test_a_null_is_the_error_of_its_row(tmp_path: Path) -> None:
    content = pa.table({"x": pa.array([0, None, 2, 3, None]), "y": list("abcde")})
    path, arrow = write(tmp_path / "x", content, 3), write_arrow(tmp_path / "y", content, 3)
    for read, unit, file in (
        (rd.Dataset.from_parquet, "row group", path),
        (rd.Dataset.from_arrow, "record batch", arrow),
    ):
        found = collect(read(file).as_numpy_iterator())
        assert [item[0] if is_error(item) else int(item["x"]) for item in found] == [0, "SpecError", 2, 3, "SpecError"]
        assert f"column 'x' has one in row 1 of {unit} 1 of file {file!r}. Give fill_null=value" in found[4][1]
        assert "null_masks=True" in found[4][1]
        assert [int(row["x"]) for row in read(file, fill_null={"x": -1})] == [0, -1, 2, 3, -1]
        masked = read(file, null_masks=True).as_numpy_iterator()
        assert [bool(row["x_is_null"]) for row in masked] == [False, True, False, False, True]
    assert len(list(rd.Dataset.from_parquet(path).ignore_errors())) == 3
    assert len(list(rd.Dataset.from_parquet(path, filters=pc.field("x").is_valid()))) == 3
    check_op(lambda: rd.Dataset.from_parquet(path, ["x"], null_masks=["x"]).map(lambda row: row["x"]))
    check_op(lambda: rd.Dataset.from_parquet(path))


def test_files_that_changed_since(tmp_path: Path, paths: list[str]) -> None:
    arrow = [write_arrow(tmp_path / name, table(0, 12)) for name in "abc"]
    from_arrow, from_parquet = rd.Dataset.from_arrow(arrow), rd.Dataset.from_parquet(paths)
    (tmp_path / "a").unlink()
    write_arrow(tmp_path / "b", table(0, 3))
    write_arrow(tmp_path / "c", pa.table({"other": [1]}))
    kinds = [item[0] for item in collect(iterate(from_arrow))]
    assert kinds == ["NotFoundError", "DataLossError", "SpecError"]
    Path(paths[0]).unlink()
    write(Path(paths[2]), pa.table({"other": [1]}))
    found = collect(iterate(from_parquet))
    assert [item[0] for item in found] == ["NotFoundError", "SpecError"]
    assert "but '" + paths[2] + "' has other: int64" in found[1][1]
    dataset = rd.Dataset.from_parquet(paths[1:2] + [write(tmp_path / "d", table(0, 20), 5)])
    write(tmp_path / "d", table(0, 19), 5)
    with pytest.raises(rd.DataLossError, match=r"must not change .* 0 .. 3 had 20 rows, and now 19 .*/d', byte 0"):
        next(iter(dataset))


def test_bad_arguments(tmp_path: Path, paths: list[str]) -> None:
    other, nothing = pa.table({"x": [1.0]}), pa.table({"d": pa.nulls(1)})
    (tmp_path / "text").write_text("no Arrow file")
    arrow = [write_arrow(tmp_path / f"{i}", one) for i, one in enumerate((table(0, 2), other, nothing))]
    parquet = [paths[0], write(tmp_path / "x", other), write(tmp_path / "y", nothing)]
    same_columns = (rd.SpecError, "All files must have the columns x: int64")
    readers: list[tuple[Any, list[str]]] = [(rd.Dataset.from_arrow, arrow), (rd.Dataset.from_parquet, parquet)]
    cases: list[tuple[Any, tuple[Any, ...], type[Exception], str]] = [
        (rd.Dataset.from_arrow, ([arrow[0], 3],), rd.SpecError, "from_arrow needs a pyarrow Table"),
        (rd.Dataset.from_arrow, (tmp_path / "text",), rd.DataLossError, "must begin with b'ARROW1', got b'no Arr'"),
        (rd.Dataset.from_parquet, (3,), rd.SpecError, "got 3"),
    ]
    for read, (good, of_floats, of_nulls) in readers:
        cases += [
            (read, (str(tmp_path / "missing"),), rd.NotFoundError, "must exist"),
            (read, (str(tmp_path),), rd.InvalidArgumentError, "is a directory"),
            (read, ([],), rd.InvalidArgumentError, f"{read.__name__} needs at least one path"),
            (read, ([good, of_floats],), *same_columns),
            (read, (of_nulls,), rd.SpecError, "Column 'd' must hold values, got nulls only"),
        ]
    settings: list[tuple[tuple[Any, ...], str]] = [
        ((["x", "z"],), r"names of columns .*\(x, t, l, s\), got \['x', 'z'\]"),
        (("x",), "got 'x'"),
        (([],), r"got \[\]"),
        ((None, [("z", ">", 1)]), "filters must be conditions on columns"),
        ((None, "x > 1"), "filters must be a pyarrow.compute.Expression"),
    ]
    cases += [(rd.Dataset.from_parquet, (paths, *args), rd.InvalidArgumentError, text) for args, text in settings]
    for read, arguments, kind, message in cases:
        with pytest.raises(kind, match=message):
            read(*arguments)


ROWS = 24


def table(start: int = 0, rows: int = ROWS) -> pa.Table:
    numbers = range(start, start + rows)
    tensors = np.arange(start * 4, (start + rows) * 4, dtype=np.int16).reshape(rows, 2, 2)
    return pa.table(
        {
            "x": pa.array(numbers, pa.int64()),
            "t": pa.FixedShapeTensorArray.from_numpy_ndarray(tensors),
            "l": pa.array([[0.5] * (i % 3) for i in numbers], pa.list_(pa.float32())),
            "s": pa.array([f"text {i}" for i in numbers]),
        }
    )


def write(path: Path, content: pa.Table, rows: int = 7) -> str:
    pq.write_table(content, path, row_group_size=rows, write_page_checksum=True)
    return str(path)


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Rows 0 .. 23 in groups of 7, no rows, and rows 24, 25."""
    parts = [table(), table().slice(0, 0), table(24, 2)]
    return [write(tmp_path / f"{i}.parquet", part) for i, part in enumerate(parts)]


def test_filters(paths: list[str]) -> None:
    cases: list[tuple[Any, Any]] = [
        ([("x", ">=", 20)], range(20, 26)),
        ([[("x", "<", 2)], [("s", "==", "text 9")]], [0, 1, 9]),
        (pc.field("x").isin([3, 13, 23]), [3, 13, 23]),
        ([("x", ">", 100)], []),
    ]
    for filters, kept in cases:
        dataset = rd.Dataset.from_parquet(paths, columns=["s"], filters=filters)
        assert [row["s"] for row in dataset] == [f"text {i}" for i in kept]
        assert dataset.cardinality() == rd.UNKNOWN_CARDINALITY
    check_op(partial(rd.Dataset.from_parquet, paths, ["s"], cases[2][0]))


def test_row_groups_that_the_filter_rules_out_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write(path, table())
    first_page = pq.ParquetFile(path).metadata.row_group(0).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[first_page : first_page + 20] = b"\xff" * 20
    path.write_bytes(content)
    assert len(list(rd.Dataset.from_parquet(path, filters=[("x", ">=", 7)]))) == ROWS - 7


def test_a_damaged_row_group_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write(path, table())
    column = pq.ParquetFile(path).metadata.row_group(1).column(3)
    content = bytearray(path.read_bytes())
    content[column.dictionary_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(content)
    found = collect(rd.Dataset.from_parquet(path).as_numpy_iterator())
    assert [i for i, item in enumerate(found) if is_error(item)] == [7]
    assert found[7][0] == "DataLossError"
    assert str(path) in found[7][1]
    assert [int(row["x"]) for row in found[8:]] == list(range(14, ROWS))
    check_op(lambda: rd.Dataset.from_parquet(path, filters=[("x", ">", 3)]))


def test_pieces_are_read_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnar_files, "_SPLIT_BYTES", 1)
    path, meeting, read_split = write(tmp_path / "x", table(0, 21)), threading.Barrier(3), ParquetFormat.read_split

    def meet(*arguments: Any) -> Any:
        meeting.wait(20)
        return read_split(*arguments)

    monkeypatch.setattr(ParquetFormat, "read_split", meet)
    options = rd.Options(threading=rd.ThreadingOptions(private_threadpool_size=3))
    dataset = rd.Dataset.from_parquet(path, ["x"]).with_options(options)
    assert [int(row["x"]) for row in dataset] == list(range(21))


def test_one_piece_at_a_time_is_read_where_one_is_asked_for(paths: list[str]) -> None:
    iterator = iterate(rd.Dataset.from_parquet(paths))
    Path(paths[2]).unlink()
    assert [int(next(iterator)["x"]) for _ in range(ROWS)] == list(range(ROWS))
    assert len(json.dumps(iterator.state_dict())) < 500
    with pytest.raises(rd.NotFoundError):
        next(iterator)
    collect(iterator)
    other = iterate(rd.Dataset.from_parquet(paths[:1]))
    other.load_state_dict(iterator.state_dict())
    with pytest.raises(rd.FailedPreconditionError, match=r"behind piece \d of the files, and they have 1 now"):
        next(other)
    iterator.close()


def test_the_state_of_a_wide_table_is_small(tmp_path: Path) -> None:
    pq.write_table(pa.table({f"a column with a long name {i}": [1, 2] for i in range(400)}), tmp_path / "wide")
    iterator = iterate(rd.Dataset.from_parquet(tmp_path / "wide").shuffle(2).batch(1))
    next(iterator)
    assert len(json.dumps(iterator.state_dict())) < 5000
    iterator.close()
