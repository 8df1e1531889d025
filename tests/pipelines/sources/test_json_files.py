from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import raydist as rd
from raydist.pipelines.sources.json_files import MAX_JSON_DEPTH, JsonParser, infer_json_types
from tests.contracts.op import check_op, collect, is_error
from tests.pipelines.formats.record_files import COMPRESS

CONTENT = (
    b'{"id": 1, "tags": ["a"], "when": "2020-01-01", "at": {"y": 2.5, "x": true}}\n\n'
    b'{"at": {"x": false, "y": -1.0}, "tags": ["b", "c"], "id": 2, "when": ""}'
)


def elements() -> list[dict[str, Any]]:
    return [
        {
            "id": np.int64(i),
            "tags": np.array(tags, object),
            "when": when,
            "at": {"y": np.float64(y), "x": np.bool_(x)},
        }
        for i, tags, when, y, x in [(1, ["a"], "2020-01-01", 2.5, True), (2, ["b", "c"], "", -1.0, False)]
    ]


@pytest.mark.parametrize("compression", COMPRESS)
def test_objects(tmp_path: Path, compression: str | None) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(COMPRESS[compression](CONTENT))
    make = partial(rd.Dataset.from_json, [path, path], compression_type=compression)
    check_op(make, elements() * 2)
    assert make().cardinality() == rd.UNKNOWN_CARDINALITY
    assert make().element_spec["tags"] == rd.TensorSpec((None,), str)
    check_op(
        partial(rd.Dataset.from_json, path, ["id"], compression_type=compression),
        [{"id": np.int64(1)}, {"id": np.int64(2)}],
    )


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


def test_further_fields_are_allowed_beside_those_that_were_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"x": 1}\n' * 1000 + b'{"x": 1, "z": 2}\n')
    assert is_error(collect(rd.Dataset.from_json(path).as_numpy_iterator())[1000])
    assert len(list(rd.Dataset.from_json(path, ["x"]))) == 1001


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


def test_types() -> None:
    lines = [b'{"d": "2020-01-01", "l": ["2020-01-01"], "s": {"d": "2020-01-01 10:00:00"}, "n": 1}', b'{"n": 2}']
    types = infer_json_types(lines)
    assert types.field("d").type == pa.string()
    assert types.field("l").type == pa.list_(pa.string())
    assert types.field("s").type == pa.struct({"d": pa.string()})
    assert types.field("n").type == pa.int64()


def test_parses_the_fields_of_the_schema() -> None:
    schema = pa.schema({"x": pa.int64()})
    assert JsonParser(schema).parse([b'{"x": 1}', b"{}"]).to_pydict() == {"x": [1, None]}
    assert JsonParser(schema, others_allowed=True).parse([b'{"y": 2, "x": 1}']).to_pydict() == {"x": [1]}
    with pytest.raises(pa.ArrowInvalid, match="unexpected field"):
        JsonParser(schema).parse([b'{"y": 2, "x": 1}'])
    long = b'{"x": 1' + b" " * (3 << 20) + b"}"
    assert JsonParser(schema).parse([long, long]).num_rows == 2
    assert JsonParser(schema).check_header(b"anything") is None


def nested(depth: int, opens: bytes = b"[", closes: bytes = b"]") -> bytes:
    return b'{"a": ' + opens * (depth - 1) + b"1" + closes * (depth - 1) + b"}"


@pytest.mark.parametrize("pair", [(b"[", b"]"), (b'{"b": ', b"}")])
def test_deep_nesting_is_not_handed_over(pair: tuple[bytes, bytes]) -> None:
    """5,000 deep was a RecursionError, and 20,000 deep ended the process."""
    assert infer_json_types([nested(MAX_JSON_DEPTH, *pair)]).names == ["a"]
    for depth in (MAX_JSON_DEPTH + 1, 5_000, 20_000):
        with pytest.raises(ValueError, match="100 deep"):
            infer_json_types([b'{"a": 1}', nested(depth, *pair)])


def test_brackets_in_text_are_no_nesting() -> None:
    line = b'{"a": "' + b'[{\\"' * 20_000 + b'", "b": [' + b"[1], " * 200 + b"[2]]}"
    assert infer_json_types([line]).names == ["a", "b"]
    with pytest.raises(ValueError, match="100 deep"):
        infer_json_types([b'{"a": "', nested(20_000)])


def test_text_must_be_utf_8() -> None:
    parser = JsonParser(pa.schema({"a": pa.string()}))
    with pytest.raises(pa.ArrowInvalid, match="UTF8"):
        parser.parse([b'{"a": "x"}', b'{"a": "\xff"}'])
