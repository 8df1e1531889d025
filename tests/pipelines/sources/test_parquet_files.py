from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import raydist as rd
from tests.contracts.op import check_op, collect, is_error, same
from tests.pipelines.sources.damage import report_damage

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


def test_rows_of_files(paths: list[str]) -> None:
    dataset = rd.Dataset.from_parquet(paths)
    assert len(dataset) == 26
    assert [int(row["x"]) for row in dataset] == list(range(26))
    assert same(collect(dataset.as_numpy_iterator()), collect(rd.Dataset.from_arrow(table(0, 26)).as_numpy_iterator()))
    check_op(lambda: rd.Dataset.from_parquet(paths[::-1]), limit=12)


def test_properties(paths: list[str]) -> None:
    dataset = rd.Dataset.from_parquet(paths[0], columns=["t", "l"])
    assert dataset.element_spec == {"t": rd.TensorSpec((2, 2), "int16"), "l": rd.TensorSpec((None,), "float32")}
    assert f"from_parquet({paths[0]!r})" in dataset.explain()
    assert "and 2 more" in rd.Dataset.from_parquet(paths).explain()
    assert list(rd.Dataset.from_parquet(paths[1])) == []


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ([("x", ">=", 20)], range(20, 26)),
        ([[("x", "<", 2)], [("s", "==", "text 9")]], [0, 1, 9]),
        (pc.field("x").isin([3, 13, 23]), [3, 13, 23]),
        ([("x", ">", 100)], []),
    ],
)
def test_filters(paths: list[str], filters: Any, kept: Any) -> None:
    dataset = rd.Dataset.from_parquet(paths, columns=["s"], filters=filters)
    assert [row["s"] for row in dataset] == [f"text {i}" for i in kept]
    assert dataset.cardinality() == rd.UNKNOWN_CARDINALITY
    check_op(partial(rd.Dataset.from_parquet, paths, ["s"], filters))


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


def test_a_null_is_the_error_of_its_row(tmp_path: Path) -> None:
    content = pa.table({"x": pa.array([0, None, 2, 3, None]), "y": list("abcde")})
    path = write(tmp_path / "x", content, 3)
    found = collect(rd.Dataset.from_parquet(path, columns=["x"]).as_numpy_iterator())
    assert [item[0] if is_error(item) else int(item["x"]) for item in found] == [0, "SpecError", 2, 3, "SpecError"]
    assert f"column 'x' has one in row 1 of row group 1 of file {path!r}. Give fill_null=value" in found[4][1]
    assert "null_masks=True" in found[4][1]
    assert len(list(rd.Dataset.from_parquet(path).ignore_errors())) == 3
    filled = rd.Dataset.from_parquet(path, fill_null={"x": -1}).as_numpy_iterator()
    assert [int(row["x"]) for row in filled] == [0, -1, 2, 3, -1]
    masked = rd.Dataset.from_parquet(path, columns=["x"], null_masks=True).as_numpy_iterator()
    assert [bool(row["x_is_null"]) for row in masked] == [False, True, False, False, True]
    check_op(lambda: rd.Dataset.from_parquet(path, null_masks=["x"]).map(lambda row: row["x"]))
    assert len(list(rd.Dataset.from_parquet(path, filters=pc.field("x").is_valid()))) == 3
    check_op(lambda: rd.Dataset.from_parquet(path))


def outcome(path: Path) -> list[Any]:
    try:
        return collect(rd.Dataset.from_parquet(path).as_numpy_iterator(), 1000)
    except rd.RaydistError as error:
        return [(type(error).__name__, str(error))]


def test_mutations_are_errors_and_never_other_data(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write(path, table())
    content, good = path.read_bytes(), outcome(path)
    metadata = pq.ParquetFile(path).metadata
    footer = len(content) - 8 - metadata.serialized_size
    draw = random.Random(7)
    noticed = 0
    for number in range(200):
        mutant = bytearray(content)
        at = draw.randrange(4, footer)
        if number % 3 == 0:
            mutant[at] ^= 1 << draw.randrange(8)
        elif number % 3 == 1:
            mutant[at : at + 8] = bytes(8)
        else:
            del mutant[at : at + draw.randrange(1, 50)]
        path.write_bytes(mutant)
        found = outcome(path)
        errors = [item for item in found if is_error(item)]
        noticed += bool(errors)
        intact = [row for row in found if not is_error(row)]
        by_number = {int(row["x"]): row for row in good}
        assert all(same([row], [by_number[int(row["x"])]]) for row in intact)
        assert errors or len(intact) == ROWS
        assert all(kind == "DataLossError" for kind, _ in errors)
    assert noticed > 100


def test_200_mutations_of_the_whole_file_never_crash(tmp_path: Path) -> None:
    content = Path(write(tmp_path / "x", table())).read_bytes()
    report = report_damage(tmp_path, "from_parquet", content, 200)
    assert report.kinds <= {"DataLossError", "SpecError", "InvalidArgumentError", "same", "other"}
    assert report.count("DataLossError") > 120
    assert report.count("other") < 10  # the footer has no checksum
    assert report.unnamed == []


@pytest.mark.parametrize("keep", [0, 3, 4, 100, -1])
def test_truncated_files(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "x"
    write(path, table())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(rd.DataLossError, match="must be an intact Parquet file") as caught:
        rd.Dataset.from_parquet(path)
    assert caught.value.path == str(path)


def test_files_that_changed_since(paths: list[str]) -> None:
    dataset = rd.Dataset.from_parquet(paths)
    Path(paths[0]).unlink()
    write(Path(paths[2]), pa.table({"other": [1]}))
    found = collect(dataset.as_numpy_iterator())
    assert [item[0] for item in found] == ["NotFoundError", "SpecError"]
    assert "but '" + paths[2] + "' has other: int64" in found[1][1]


def test_bad_arguments(tmp_path: Path, paths: list[str]) -> None:
    other = write(tmp_path / "other", pa.table({"x": [1.0]}))
    nothing = write(tmp_path / "nothing", pa.table({"d": pa.nulls(1)}))
    cases: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((str(tmp_path / "missing"),), rd.NotFoundError, "must exist"),
        ((str(tmp_path),), rd.InvalidArgumentError, "is a directory"),
        (([],), rd.InvalidArgumentError, "from_parquet needs at least one path"),
        ((3,), rd.SpecError, "got 3"),
        ((paths, ["x", "z"]), rd.InvalidArgumentError, r"names of columns .*\(x, t, l, s\), got \['x', 'z'\]"),
        ((paths, "x"), rd.InvalidArgumentError, "got 'x'"),
        ((paths, []), rd.InvalidArgumentError, r"got \[\]"),
        ((paths, None, [("z", ">", 1)]), rd.InvalidArgumentError, "filters must be conditions on columns"),
        ((paths, None, "x > 1"), rd.InvalidArgumentError, "filters must be a pyarrow.compute.Expression"),
        (([paths[0], other],), rd.SpecError, "All files must have the columns x: int64"),
        ((nothing,), rd.SpecError, "Column 'd' must hold values, got nulls only"),
    ]
    for arguments, kind, message in cases:
        with pytest.raises(kind, match=message):
            rd.Dataset.from_parquet(*arguments)


def test_reads_a_uri(paths: list[str]) -> None:
    system = fsspec.filesystem("memory")
    system.pipe("/in/x.parquet", Path(paths[2]).read_bytes())
    assert [int(row["x"]) for row in rd.Dataset.from_parquet("memory://in/x.parquet")] == [24, 25]
    system.rm("/in", recursive=True)
