from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import raydist as rd
from raydist.pipelines.sources.json_files import infer_json_types
from tests.contracts.op import check_op, collect, is_error, same
from tests.pipelines.formats.record_files import COMPRESS

CSV = b'id,name,score,ok\r\n1,Ann,0.5,true\r\n\r\n2,"Bob, ""the"" 2nd",nan,false\r\n3,,1e3,true'
ROWS = [(1, "Ann", 0.5, True), (2, 'Bob, "the" 2nd', float("nan"), False), (3, "", 1000.0, True)]


def csv_elements() -> list[dict[str, Any]]:
    return [
        {"id": np.int64(i), "name": name, "score": np.float64(score), "ok": np.bool_(ok)} for i, name, score, ok in ROWS
    ]


def test_rows_of_csv(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    for compression, compress in COMPRESS.items():
        path.write_bytes(compress(CSV))
        found = rd.Dataset.from_csv([path, path], compression_type=compression)
        assert same(collect(found.as_numpy_iterator()), csv_elements() * 2), compression
    check_op(lambda: rd.Dataset.from_csv([path, path], compression_type="ZLIB"), csv_elements() * 2)


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
        [{"c": np.float32(0), "a": np.int16(1), "b": b"a"}, {"c": np.float32(2.5), "a": np.int16(-1), "b": b"none"}],
    )


def test_wrong_lines_of_csv_are_errors_in_their_place(tmp_path: Path) -> None:
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
        *(1, "NotFoundError", "SpecError", "SpecError", 1)
    ]
    assert found[2][1].endswith("must have the names ['x'], got ['y'].")
    assert found[3][1].endswith("must be there, but the file is empty.")


def test_bad_arguments_of_from_csv(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(CSV)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "bad").write_bytes(b"a,b\n1\n")
    (tmp_path / "twice").write_bytes(b"a,a\n1,2\n")
    files: list[tuple[Any, type[Exception], str]] = [
        (tmp_path / "missing", rd.NotFoundError, "must exist"),
        (tmp_path, rd.InvalidArgumentError, "is a directory"),
        ([], rd.InvalidArgumentError, "at least one path"),
        (tmp_path / "empty", rd.DataLossError, "the file has no header"),
        (tmp_path / "bad", rd.DataLossError, "must tell the columns"),
        (tmp_path / "twice", rd.SpecError, r"must have different names, got \['a', 'a'\]"),
    ]
    for paths, kind, message in files:
        with pytest.raises(kind, match=message):
            rd.Dataset.from_csv(paths)
    (tmp_path / "only header").write_bytes(b"x\n")
    assert rd.Dataset.from_csv(tmp_path / "only header").element_spec == {"x": rd.TensorSpec((), str)}
    with pytest.raises(rd.DataLossError, match="written with compression_type='GZIP'"):
        rd.Dataset.from_csv(path, compression_type="GZIP")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"columns": ["id", "z"]}, r"\(id, name, score, ok\), got \['z'\]"),
        ({"columns": "id"}, "got 'id'"),
        ({"columns": [4, -1, 0]}, r"must name columns of the file .*got \[4, -1\]"),
        ({"columns": ["id"], "select_columns": ["ok"]}, r"columns or select_columns, got \['id'\] and \['ok'\]"),
        ({"column_types": {"z": int}}, r"got \['z'\]"),
        ({"column_types": {"id": "complex64"}}, "must be types that CSV can hold"),
        ({"column_defaults": {"z": 1}}, "got 1 for 'z'"),
        ({"column_defaults": {"id": "one"}}, "got 'one' for 'id'"),
        ({"column_defaults": [1]}, r"one value or dtype for each column, id, name, .*got \[1\]"),
        ({"columns": ["id", "ok"], "label_name": "name"}, "label_name must be one of several columns, got 'name'"),
        ({"columns": ["id"], "batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"delimiter": ";;"}, "one character"),
        ({"compression_type": "ZIP"}, "got 'ZIP'"),
    ]
    for options, message in cases:
        with pytest.raises(rd.InvalidArgumentError, match=message):
            rd.Dataset.from_csv(path, **options)


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


def test_columns_by_name_or_number(tmp_path: Path) -> None:
    choices: list[Any] = [["sex", "age"], [1, 2], (1, "age")]
    for columns in choices:
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


def test_dates_of_json_stay_text() -> None:
    objects = [b'{"d": "2020-01-01", "l": ["2020-01-01"], "s": {"d": "2020-01-01 10:00:00"}, "n": 1}', b'{"n": 2}']
    found = infer_json_types(objects)
    expected = {"d": pa.string(), "l": pa.list_(pa.string()), "s": pa.struct({"d": pa.string()}), "n": pa.int64()}
    assert {field.name: field.type for field in found} == expected


CONTENT = (
    b'{"id": 1, "tags": ["a"], "when": "2020-01-01", "at": {"y": 2.5, "x": true}}\n\n'
    b'{"at": {"x": false, "y": -1.0}, "tags": ["b", "c"], "id": 2, "when": ""}'
)


def elements() -> list[dict[str, Any]]:
    return [
        {"id": np.int64(i), "tags": np.array(tags, object), "when": when, "at": {"y": np.float64(y), "x": np.bool_(x)}}
        for i, tags, when, y, x in [(1, ["a"], "2020-01-01", 2.5, True), (2, ["b", "c"], "", -1.0, False)]
    ]


def test_objects(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for compression, compress in COMPRESS.items():
        path.write_bytes(compress(CONTENT))
        make = partial(rd.Dataset.from_json, [path, path], compression_type=compression)
        assert same(collect(make().as_numpy_iterator()), elements() * 2), compression
    check_op(make, elements() * 2)
    assert make().cardinality() == rd.UNKNOWN_CARDINALITY
    assert make().element_spec["tags"] == rd.TensorSpec((None,), str)
    assert collect(rd.Dataset.from_json(path, ["id"], compression_type="ZLIB").as_numpy_iterator()) == [
        {"id": 1},
        {"id": 2},
    ]
    path.write_bytes(b'{"x": 1}\n' * 1000 + b'{"x": 1, "z": 2}\n')  # other fields may stand beside those that are named
    assert is_error(collect(rd.Dataset.from_json(path).as_numpy_iterator())[1000])
    assert len(list(rd.Dataset.from_json(path, ["x"]))) == 1001


def test_wrong_lines_are_errors_in_their_place(tmp_path: Path) -> None:
    lines = [b'{"x": %d}' % i for i in range(1200)]
    lines[1001:1009] = [
        *(b'{"x": 0.5}', b'{"x": "a"}', b"3", b'{"x": 1', b'{"x": 1}{"x": 2}', b'{"y": 1}'),
        *(b"[" * 5000, b'{"x": null}'),
    ]
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join(lines))
    make = partial(rd.Dataset.from_json, path)
    found = collect(make().as_numpy_iterator())
    assert [i for i, item in enumerate(found) if is_error(item)] == list(range(1001, 1009))
    assert [kind for kind, _ in found[1001:1009]] == ["DataLossError"] * 7 + ["SpecError"]
    assert len(found) == 1200
    assert all(int(item["x"]) == i for i, item in enumerate(found) if not is_error(item))
    assert "Line 1002 must be one JSON object with the dataset's fields, got b'{\"x\": 0.5}'" in found[1001][1]
    assert "it holds 2 rows" in found[1005][1]
    assert "column 'x' has no value in line 1009" in found[1008][1]
    check_op(lambda: make().skip(1000), limit=11)


def test_bad_arguments(tmp_path: Path) -> None:
    contents = {
        "good": b'{"x": 1}\n',
        "empty": b"\n",
        "text": b"hello\n",
        "mixed": b'{"x": 1}\n{"x": "a"}\n',
        "nothing": b'{"x": null}\n',
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    cases: list[tuple[str, dict[str, Any], type[Exception], str]] = [
        ("missing", {}, rd.NotFoundError, "must exist"),
        ("", {}, rd.InvalidArgumentError, "is a directory"),
        ("empty", {}, rd.InvalidArgumentError, "must have a line to tell the fields"),
        ("text", {}, rd.DataLossError, "must be JSON objects of one kind"),
        ("mixed", {}, rd.DataLossError, "must be JSON objects of one kind"),
        ("nothing", {}, rd.SpecError, "Column 'x' must hold values, got nulls only"),
        ("good", {"columns": ["y"]}, rd.InvalidArgumentError, r"fields of the objects in '.*' \(x\), got \['y'\]"),
        ("good", {"columns": []}, rd.InvalidArgumentError, r"got \[\]"),
        ("good", {"compression_type": "ZLIB"}, rd.DataLossError, "written with compression_type='ZLIB'"),
    ]
    for name, options, kind, message in cases:
        with pytest.raises(kind, match=message):
            rd.Dataset.from_json(tmp_path / name, **options)


def test_deep_nesting_and_broken_text_are_errors_at_their_places(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    deep = b'{"a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"
    path.write_bytes(b'{"a": "0"}\n' * 1000 + deep + b'\n{"a": "\xff"}\n{"a": "1"}\n')
    found = collect(rd.Dataset.from_json(path).as_numpy_iterator())
    assert [item[0] for item in found if is_error(item)] == ["DataLossError"] * 2
    assert ["Line 1001" in found[1000][1], "byte 11000" in found[1000][1], found[-1]] == [True, True, {"a": "1"}]
    path.write_bytes(deep)
    with pytest.raises(rd.DataLossError, match="100 deep"):
        rd.Dataset.from_json(path)
