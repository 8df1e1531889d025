from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import raydist as rd
from tests.contracts.op import check_op, collect, iterate
from tests.pipelines.sources.saved_hub_dataset import save_to_disk

ROWS = 20
FEATURES = {
    "id": {"dtype": "int64", "_type": "Value"},
    "label": {"names": ["a", "b"], "_type": "ClassLabel"},
    "tokens": {"feature": {"dtype": "int32", "_type": "Value"}, "_type": "List"},
    "grid": {"shape": [2, 3], "dtype": "float32", "_type": "Array2D"},
    "tall": {"shape": [None, 2], "dtype": "int8", "_type": "Array2D"},
    "parts": {"feature": {"a": {"shape": [1, 2], "dtype": "int8", "_type": "Array2D"}}, "_type": "Sequence"},
    "picture": {"decode": True, "_type": "Image"},
    "weight": {"dtype": "float64", "_type": "Value"},
}


def table() -> pa.Table:
    return pa.table(
        {
            "id": pa.array(range(ROWS)),
            "label": pa.array([i % 2 for i in range(ROWS)]),
            "tokens": pa.array([[i] * (i % 3) for i in range(ROWS)], pa.list_(pa.int32())),
            "grid": pa.array([[[i, 1, 2], [3, 4, 5]] for i in range(ROWS)], pa.list_(pa.list_(pa.float32()))),
            "tall": pa.array([[[1, 2]] * (i % 3) for i in range(ROWS)], pa.list_(pa.list_(pa.int8()))),
            "parts": pa.array([{"a": [[[1, 2]]] * (i % 2)} for i in range(ROWS)]),
            "picture": pa.array([{"bytes": b"%d" % i, "path": None} for i in range(ROWS)]),
            "weight": pa.array([i / 3 for i in range(ROWS)]),
        }
    )


@pytest.fixture
def saved(tmp_path: Path) -> str:
    return save_to_disk(tmp_path / "saved", table(), FEATURES)


def test_a_saved_directory(saved: str) -> None:
    dataset = rd.Dataset.from_huggingface(saved)
    assert len(dataset) == ROWS
    spec = dataset.element_spec
    assert spec["grid"] == rd.TensorSpec((2, 3), "float32")
    assert spec["tall"] == rd.TensorSpec((None, 2), "int8")
    assert spec["parts"]["a"] == rd.TensorSpec((None, 1, 2), "int64")
    rows = list(dataset.as_numpy_iterator())
    assert [int(row["id"]) for row in rows] == list(range(ROWS))
    for name in ("tokens", "tall", "grid"):
        assert [row[name].tolist() for row in rows] == table()[name].to_pylist(), name
    assert rows[3]["picture"] == {"bytes": b"3", "path": ""}
    assert len(pickle.dumps(dataset)) < 4000  # it names the files
    check_op(lambda: rd.Dataset.from_huggingface(saved))
    check_op(lambda: rd.Dataset.from_huggingface(saved).global_shuffle(seed=2).map(lambda row: row["id"]).batch(3))


def test_formats(tmp_path: Path) -> None:
    columns = ["weight", "label", "tokens"]
    torch_format: dict[str, Any] = {"_format_type": "torch", "_format_columns": columns}
    path = save_to_disk(tmp_path / "torch", table(), FEATURES, **torch_format)
    assert rd.Dataset.from_huggingface(path).element_spec == {
        "label": rd.TensorSpec((), "int64"),
        "tokens": rd.TensorSpec((None,), "int64"),
        "weight": rd.TensorSpec((), "float32"),
    }
    path = save_to_disk(tmp_path / "all", table(), FEATURES, _output_all_columns=True, **torch_format)
    assert len(rd.Dataset.from_huggingface(path).element_spec) == len(FEATURES)


def test_nulls_are_errors_of_their_rows(tmp_path: Path) -> None:
    content = pa.table({"id": range(6), "y": pa.array([1, None, 2, None, 3, 4])})
    path = save_to_disk(tmp_path / "nulls", content)
    found = collect(iterate(rd.Dataset.from_huggingface(path)))
    assert [item[0] if isinstance(item, tuple) else int(item["y"]) for item in found] == [
        *(1, "SpecError", 2, "SpecError", 3, 4)
    ]
    assert "column 'y' has one in row 3. Give fill_null=" in found[3][1]
    assert [int(row["id"]) for row in rd.Dataset.from_huggingface(path).ignore_errors()] == [0, 2, 4, 5]
    assert [int(row["y"]) for row in rd.Dataset.from_huggingface(path, fill_null=-100)] == [1, -100, 2, -100, 3, 4]
    masks = rd.Dataset.from_huggingface(path, null_masks=["y"]).shuffle(6, seed=1)
    assert sorted(int(row["id"]) for row in masks if row["y_is_null"]) == [1, 3]


def _padding(name: str, **members: Any) -> Any:
    return type(name, (), {"__module__": "datasets.padding", **members})()


def _table_of_datasets(content: pa.Table) -> Any:
    return _padding("InMemoryTable", table=content)


def _dataset(order: list[int] | None = None, form: dict[str, Any] | None = None) -> Any:
    mapping = None if order is None else _table_of_datasets(pa.table({"indices": pa.array(order, pa.uint64())}))
    usual: dict[str, Any] = {"type": None, "columns": None, "format_kwargs": {}, "output_all_columns": False}
    return _padding(
        "Dataset",
        data=_table_of_datasets(table()),
        features=_padding("Features", to_dict=lambda self: FEATURES),
        format={**usual, **(form or {})},
        _indices=mapping,
    )


def test_a_dataset_with_an_order_of_its_own() -> None:
    dataset = rd.Dataset.from_huggingface(_dataset([7, 3, 19, 3]))
    assert [int(row["id"]) for row in dataset] == [7, 3, 19, 3]
    assert [int(row["id"]) for row in pickle.loads(pickle.dumps(dataset))] == [7, 3, 19, 3]
    double = _dataset([1], {"type": "numpy", "columns": ["id"], "format_kwargs": {"dtype": "float64"}})
    assert rd.Dataset.from_huggingface(double).element_spec == {"id": rd.TensorSpec((), "float64")}
    check_op(lambda: rd.Dataset.from_huggingface(_dataset([7, 3, 19, 3])).shuffle(4, seed=1))


def test_what_is_none_says_what_to_write(tmp_path: Path, saved: str) -> None:
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    splits: Any = type("DatasetDict", (dict,), {"__module__": "datasets.dataset_dict"})(train=1)
    cases: list[tuple[Any, type[Exception], str]] = [
        (splits, rd.SpecError, r"needs one split, .*of 'train'. Give dataset\['train'\]"),
        (_padding("IterableDataset"), rd.SpecError, r"Use rd.Dataset.from_torch\(dataset\)"),
        (_dataset(form={"type": "custom"}), rd.InvalidArgumentError, r"set_transform.*call the function with .map"),
        ([1, 2], rd.SpecError, r"got \[1, 2\] \(list\)"),
        (tmp_path, rd.InvalidArgumentError, "one split, .* 'train', 'test'. Give .*train'"),
        ("s3://bucket/data", rd.InvalidArgumentError, "needs a local directory, got 's3://bucket/data'"),
        (tmp_path / "missing", rd.NotFoundError, "state.json"),
    ]
    for source, kind, message in cases:
        with pytest.raises(kind, match=message):
            rd.Dataset.from_huggingface(source)
    with pytest.raises(rd.InvalidArgumentError, match="fill_null must name columns"):
        rd.Dataset.from_huggingface(saved, fill_null={"nothing": 0})


def test_damaged_directories(tmp_path: Path, saved: str) -> None:
    first = Path(saved) / "data-00000-of-00002.arrow"
    content = first.read_bytes()
    for damaged in (
        content[:-9],
        content[:-8],
        content[: len(content) // 2],
        b"",
        content[:40] + b"\xff" * 60 + content[100:],
    ):
        first.write_bytes(damaged)
        with pytest.raises(rd.DataLossError, match="data-00000-of-00002.arrow"):
            rd.Dataset.from_huggingface(saved)
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile(str(first), "wb") as sink, pa.ipc.new_stream(sink, table().schema, options=options) as writer:
        writer.write_table(table())
    with pytest.raises(rd.InvalidArgumentError, match="must not be compressed"):
        rd.Dataset.from_huggingface(saved)
    first.write_bytes(content)
    states: list[tuple[str, type[Exception], str]] = [
        ("{", rd.DataLossError, "must be JSON"),
        ("{}", rd.DataLossError, "must name the files"),
        ('{"_data_files": []}', rd.DataLossError, "must have files"),
        ('{"_data_files": [{"filename": "../x.arrow"}]}', rd.InvalidArgumentError, "must lie in its directory"),
    ]
    for text, kind, message in states:
        (Path(saved) / "state.json").write_text(text)
        with pytest.raises(kind, match=message):
            rd.Dataset.from_huggingface(saved)


def test_offsets_are_checked_before_a_row_is_read(tmp_path: Path) -> None:
    text = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.py_buffer(np.array([0, 1, 1 << 28, 2], np.int32)), pa.py_buffer(b"ab")]
    )
    path = save_to_disk(tmp_path / "x", pa.table({"x": text}), num_shards=1)
    found = collect(iterate(rd.Dataset.from_huggingface(path)))
    assert [item[0] for item in found] == ["DataLossError"] * 3
    assert "record batch 0" in found[0][1]
