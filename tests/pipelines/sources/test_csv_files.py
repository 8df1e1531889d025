from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import raydist as rd
from raydist.pipelines.sources.csv_files import CsvParser, header_names, infer_csv_types
from tests.contracts.op import check_op, collect, is_error
from tests.pipelines.formats.record_files import COMPRESS

CONTENT = b'id,name,score,ok\r\n1,Ann,0.5,true\r\n\r\n2,"Bob, ""the"" 2nd",nan,false\r\n3,,1e3,true'
ROWS = [(1, "Ann", 0.5, True), (2, 'Bob, "the" 2nd', float("nan"), False), (3, "", 1000.0, True)]


def elements() -> list[dict[str, Any]]:
    return [
        {"id": np.int64(i), "name": name, "score": np.float64(score), "ok": np.bool_(ok)} for i, name, score, ok in ROWS
    ]


@pytest.mark.parametrize("compression", COMPRESS)
def test_rows(tmp_path: Path, compression: str | None) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(COMPRESS[compression](CONTENT))
    check_op(lambda: rd.Dataset.from_csv([path, path], compression_type=compression), elements() * 2)


def test_properties(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"\xef\xbb\xbf" + CONTENT)
    dataset = rd.Dataset.from_csv(tmp_path / "x.csv")
    assert dataset.element_spec == {
        "id": rd.TensorSpec((), "int64"),
        "name": rd.TensorSpec((), str),
        "score": rd.TensorSpec((), "float64"),
        "ok": rd.TensorSpec((), "bool"),
    }
    assert dataset.cardinality() == rd.UNKNOWN_CARDINALITY
    assert "x.csv', compression_type=None)" in dataset.explain()


def test_columns_types_defaults_and_names(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b"1;a;\n;;2.5\n")
    make = partial(
        rd.Dataset.from_csv,
        path,
        ["c", "a", "b"],
        column_names=["a", "b", "c"],
        column_types={"b": bytes, "c": "float32", "a": "int16"},
        column_defaults={"a": -1, "b": b"none", "c": 0},
        delimiter=";",
    )
    check_op(
        make,
        [
            {"c": np.float32(0), "a": np.int16(1), "b": b"a"},
            {"c": np.float32(2.5), "a": np.int16(-1), "b": b"none"},
        ],
    )


def test_wrong_lines_are_errors_in_their_place(tmp_path: Path) -> None:
    lines = [b"x,y", *(b"%d,%d" % (i, -i) for i in range(200))]
    lines[50], lines[120], lines[121], lines[200] = b"5,", b"1,2,3", b"a,1", b'1,"2'
    path = tmp_path / "x.csv"
    path.write_bytes(b"\n".join(lines))
    make = partial(rd.Dataset.from_csv, path, column_types={"x": "int64", "y": "int64"})
    found = collect(make().as_numpy_iterator())
    wrong = {i: item for i, item in enumerate(found) if is_error(item)}
    assert {i: kind for i, (kind, _) in wrong.items()} == {
        49: "SpecError",
        119: "DataLossError",
        120: "DataLossError",
        199: "DataLossError",
    }
    assert all(int(item["x"]) == i for i, item in enumerate(found) if i not in wrong)
    assert "column 'y' has no value in line 51" in wrong[49][1]
    assert "Line 121 must be one row of the CSV columns, got b'1,2,3'" in wrong[119][1]
    offset = len(b"\n".join(lines[:121])) + 1
    assert wrong[120][1].endswith(f"byte {offset}).")
    assert "a quoted field must end on the line" in wrong[199][1]
    check_op(lambda: make().skip(115), limit=10)


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x\n1\n")
    (tmp_path / "b").write_bytes(b"y\n1\n")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "only header").write_bytes(b"x\n")
    names = ["a", "missing", "b", "empty", "only header", "a"]
    found = collect(rd.Dataset.from_csv([tmp_path / name for name in names]).as_numpy_iterator())
    assert [item[0] if is_error(item) else int(item["x"]) for item in found] == [
        *(1, "NotFoundError", "SpecError", "SpecError", 1),
    ]
    assert found[2][1].endswith("must have the names ['x'], got ['y'].")
    assert found[3][1].endswith("must be there, but the file is empty.")


def test_damaged_compressed_file(tmp_path: Path) -> None:
    packed = COMPRESS["GZIP"](b"x\n" + b"".join(b"%d\n" % i for i in range(5000)))
    path = tmp_path / "x.csv"
    path.write_bytes(packed[:-300])
    found = collect(rd.Dataset.from_csv(path, compression_type="GZIP").as_numpy_iterator())
    assert found[-1][0] == "DataLossError"
    intact = [int(item["x"]) for item in found if not is_error(item)]
    assert intact[:4000] == list(range(min(4000, len(intact))))


def test_bad_arguments(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(CONTENT)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "bad").write_bytes(b"a,b\n1\n")
    (tmp_path / "twice").write_bytes(b"a,a\n1,2\n")
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (tmp_path / "missing", {}, rd.NotFoundError, "must exist"),
        (tmp_path, {}, rd.InvalidArgumentError, "is a directory"),
        ([], {}, rd.InvalidArgumentError, "at least one path"),
        (tmp_path / "empty", {}, rd.DataLossError, "the file has no header"),
        (tmp_path / "bad", {}, rd.DataLossError, "must tell the columns"),
        (tmp_path / "twice", {}, rd.SpecError, r"must have different names, got \['a', 'a'\]"),
        (path, {"columns": ["id", "z"]}, rd.InvalidArgumentError, r"\(id, name, score, ok\), got \['z'\]"),
        (path, {"columns": "id"}, rd.InvalidArgumentError, "got 'id'"),
        (path, {"column_types": {"z": int}}, rd.InvalidArgumentError, r"got \['z'\]"),
        (path, {"column_types": {"id": "complex64"}}, rd.InvalidArgumentError, "must be types that CSV can hold"),
        (path, {"column_defaults": {"z": 1}}, rd.InvalidArgumentError, "got 1 for 'z'"),
        (path, {"column_defaults": {"id": "one"}}, rd.InvalidArgumentError, "got 'one' for 'id'"),
        (path, {"delimiter": ";;"}, rd.InvalidArgumentError, "one character"),
        (path, {"compression_type": "ZIP"}, rd.InvalidArgumentError, "got 'ZIP'"),
        (path, {"compression_type": "GZIP"}, rd.DataLossError, "written with compression_type='GZIP'"),
    ]
    for paths, options, kind, message in cases:
        with pytest.raises(kind, match=message):
            rd.Dataset.from_csv(paths, **options)


def test_columns_are_in_the_order_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(CONTENT)
    dataset = rd.Dataset.from_csv(tmp_path / "x.csv")
    for element in (dataset.element_spec, next(dataset.as_numpy_iterator()), next(iter(dataset.batch(2)))):
        assert list(element) == ["id", "name", "score", "ok"]
    chosen = rd.Dataset.from_csv(tmp_path / "x.csv", columns=["score", "id"])
    assert list(chosen.element_spec) == list(next(iter(chosen))) == ["score", "id"]


def table(tmp_path: Path) -> Path:
    path = tmp_path / "titanic.csv"
    path.write_text("survived,sex,age,fare\n0,male,22,7.25\n1,female,38,71.3\n1,female,,7.9\n")
    return path


def test_batches_with_a_label(tmp_path: Path) -> None:
    ds = rd.Dataset.from_csv(
        table(tmp_path),
        batch_size=2,
        label_name="survived",
        select_columns=["survived", "fare", "age"],
        column_defaults={"age": -1},
    )
    assert ds.element_spec == (
        {"age": rd.TensorSpec((None,), "int64"), "fare": rd.TensorSpec((None,), "float64")},
        rd.TensorSpec((None,), "int64"),
    )
    batches = [({k: v.tolist() for k, v in x.items()}, y.tolist()) for x, y in ds]
    assert batches == [({"age": [22, 38], "fare": [7.25, 71.3]}, [0, 1]), ({"age": [-1], "fare": [7.9]}, [1])]
    rows = rd.Dataset.from_csv(table(tmp_path), ["sex", "survived"], label_name="survived")
    assert list(rows.as_numpy_iterator())[1] == ({"sex": "female"}, 1)


@pytest.mark.parametrize("columns", [["sex", "age"], [1, 2], (np.int64(1), "age")])
def test_columns_by_name_or_number(tmp_path: Path, columns: Any) -> None:
    columns = [column if isinstance(column, str) else int(column) for column in columns]
    ds = rd.Dataset.from_csv(table(tmp_path), select_columns=columns, column_defaults=["none", 0.5])
    assert ds.element_spec == {"age": rd.TensorSpec((), "float32"), "sex": rd.TensorSpec((), str)}
    assert [row["age"] for row in ds.as_numpy_iterator()] == [22, 38, 0.5]


def test_a_list_of_defaults_and_dtypes(tmp_path: Path) -> None:
    ds = rd.Dataset.from_csv(table(tmp_path), column_defaults=[torch.int32, np.dtype("S"), np.float32(-1), float])
    assert ds.element_spec == {
        "survived": rd.TensorSpec((), "int32"),
        "sex": rd.TensorSpec((), bytes),
        "age": rd.TensorSpec((), "float32"),
        "fare": rd.TensorSpec((), "float64"),
    }
    assert [float(row["age"]) for row in ds] == [22, 38, -1]
    assert rd.Dataset.from_csv(table(tmp_path), ["age"], column_defaults={"age": np.int16}).element_spec == {
        "age": rd.TensorSpec((), "int16")
    }
    with pytest.raises(rd.SpecError, match="'age' has no value in line 4"):
        list(rd.Dataset.from_csv(table(tmp_path), ["age"], column_defaults=[np.float32]))
    typed = rd.Dataset.from_csv(table(tmp_path), ["age"], column_types={"age": "float64"}, column_defaults=[3])
    assert typed.element_spec == {"age": rd.TensorSpec((), "float64")}


def test_columns_and_defaults_that_do_not_fit(tmp_path: Path) -> None:
    path = table(tmp_path)
    with pytest.raises(rd.InvalidArgumentError, match=r"columns or select_columns, got \['age'\] and \['fare'\]"):
        rd.Dataset.from_csv(path, ["age"], select_columns=["fare"])
    with pytest.raises(
        rd.InvalidArgumentError, match=r"one value or dtype for each column, survived, sex, .*got \[1\]"
    ):
        rd.Dataset.from_csv(path, column_defaults=[1])
    with pytest.raises(rd.InvalidArgumentError, match=r"must name columns of the file .*got \[4, -1\]"):
        rd.Dataset.from_csv(path, [4, -1, 0])
    with pytest.raises(rd.InvalidArgumentError, match="label_name must be one of several columns, got 'age'"):
        rd.Dataset.from_csv(path, ["sex", "fare"], label_name="age")
    with pytest.raises(rd.InvalidArgumentError, match="batch_size must be >= 1, got 0"):
        rd.Dataset.from_csv(path, ["sex"], batch_size=0)


def test_a_state_of_labelled_batches(tmp_path: Path) -> None:
    def make() -> Any:
        return iter(rd.Dataset.from_csv(table(tmp_path), ["sex", "survived"], batch_size=1, label_name="survived"))

    iterator = make()
    next(iterator)
    resumed = make()
    resumed.load_state_dict(iterator.state_dict())
    assert [y.tolist() for _, y in resumed] == [[1], [1]]


def test_types() -> None:
    lines = [b"1,1.5,true,2020-01-01,,x", b"2,nan,false,2020-01-02,,"]
    types = infer_csv_types(lines, list("abcdef"), ",")
    assert types.types == [pa.int64(), pa.float64(), pa.bool_(), pa.string(), pa.string(), pa.string()]
    assert infer_csv_types([], ["a"], ",").types == [pa.string()]


def test_parses_the_columns_of_the_schema() -> None:
    parser = CsvParser(pa.schema({"b": pa.int8()}), ("a", "b"), delimiter="\t", defaults={"b": 7})
    assert parser.parse([b"x\t1", b"y\t"]).to_pydict() == {"b": [1, 7]}
    for wrong in (b"x", b"x\t300", b'"x\t1', b"x\t1\t2"):
        with pytest.raises(pa.ArrowInvalid):
            parser.parse([wrong])


def test_header() -> None:
    assert header_names(b'\xef\xbb\xbfa;"b;c"', ";") == ("a", "b;c")
    parser = CsvParser(pa.schema({"a": pa.int8()}), ("a",))
    assert parser.check_header(b"a") is None
    assert parser.check_header(b"a,b") == "must have the names ['a'], got ['a', 'b']"
