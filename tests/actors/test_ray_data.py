from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray.data
import torch
from ray.exceptions import RayTaskError

import raydist as rd
from tests.contracts.op import collect, is_error, iterate

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.filterwarnings("ignore")]  # Ray Data's own warnings


@pytest.fixture(scope="module")
def squares() -> Any:
    """100 rows in 5 blocks, of which the first takes longest."""

    def row(values: dict[str, Any]) -> dict[str, Any]:
        x = int(values["id"])
        return {"x": x, "text": str(x), "square": np.full((2, 2), x * x)}

    return ray.data.range(100, override_num_blocks=5).map(row)


def test_rows_come_in_order_with_their_types(squares: Any) -> None:
    dataset = rd.Dataset.from_ray(squares)
    assert dataset.element_spec == {
        "x": rd.TensorSpec((), "int64"),
        "text": rd.TensorSpec((), "U"),
        "square": rd.TensorSpec((2, 2), "int64"),
    }
    rows = list(dataset.as_numpy_iterator())
    assert [int(row["x"]) for row in rows] == list(range(100))
    assert rows[7]["text"] == "7"
    assert rows[7]["square"].tolist() == [[49, 49], [49, 49]]
    assert squares.context.execution_options.preserve_order is False, "the user's dataset keeps its settings"
    assert dataset.cardinality() == rd.UNKNOWN_CARDINALITY
    assert len(rd.Dataset.from_ray(squares.materialize())) == 100


def test_resuming_passes_over_what_was_handed_out(squares: Any) -> None:
    dataset = rd.Dataset.from_ray(squares).batch(7)
    first = dataset.as_numpy_iterator()
    seen = [next(first) for _ in range(4)]
    state = json.loads(json.dumps(first.state_dict()))
    first.close()
    second = dataset.as_numpy_iterator()
    second.load_state_dict(state)
    assert len(seen) == 4
    assert next(second)["x"].tolist() == list(range(28, 35))
    second.close()


def test_a_null_stands_in_its_place_and_what_is_no_dataset_is_refused() -> None:
    dataset = rd.Dataset.from_ray(ray.data.from_arrow(pa.table({"x": [1, None, 3]})))
    assert [is_error(item) for item in collect(iterate(dataset))] == [False, True, False]
    with pytest.raises(rd.SpecError, match="from_ray needs a ray.data.Dataset, got 3"):
        rd.Dataset.from_ray(3)


def test_an_error_in_ray_ends_the_pass() -> None:
    def fail(row: dict[str, Any]) -> dict[str, Any]:
        raise ZeroDivisionError("bad row")

    dataset = rd.Dataset.from_ray(ray.data.from_arrow(pa.table({"x": [1, 2]})).map(fail))
    iterator = dataset.as_numpy_iterator()
    with pytest.raises(RayTaskError, match="ZeroDivisionError: bad row") as caught:
        next(iterator)
    assert "the dataset of from_ray" in str(caught.value.__notes__)
    assert list(iterator) == []


# --- Dataset.to_ray ---------------------------------------------------------------------------------------------------


def test_elements_are_rows_in_order_and_columns_are_named_by_the_leaves() -> None:
    dataset = rd.Dataset.range(1000).map(lambda x: {"x": x, "image": np.full((2, 3), x)})
    rows = dataset.to_ray().take_all()
    assert [row["x"] for row in rows] == list(range(1000))
    assert rows[5]["image"].tolist() == [[5] * 3] * 2
    makes: list[tuple[Any, list[str]]] = [
        (lambda x: x, ["item"]),
        (lambda x: (x, b"a"), ["item_0", "item_1"]),
        (lambda x: {"a": {"b": x}}, ["a.b"]),
    ]
    for make, columns in makes:
        assert rd.Dataset.range(3).map(make).to_ray().columns() == columns


def test_every_execution_reads_the_same_epoch() -> None:
    dataset = rd.Dataset.range(50).shuffle(50, seed=1)
    rows = dataset.to_ray()
    first, again, second = ([row["item"] for row in source.take_all()] for source in (rows, rows, dataset.to_ray()))
    assert first == again != second
    assert [int(x) for x in rd.Dataset.range(50).shuffle(50, seed=1)] == first


def batched_text(kind: str) -> rd.Dataset:
    words = np.array(["a", "bb", "", "c\0", "d"], object)
    if kind == "bytes":
        words = np.array([word.encode() for word in words], object)
    elements = rd.Dataset.from_tensor_slices({"z": words, "a": np.arange(5)})
    if kind == "ragged":
        return elements.map(lambda e: {"z": words[: int(e["a"])], "a": e["a"]})
    if kind == "scalar":
        return elements
    return elements.batch(2).map(lambda e: {"z": e["z"], "a": e["a"].sum()})


def test_text_there_and_back() -> None:
    for kind in ("str", "bytes", "ragged", "scalar"):
        dataset = batched_text(kind)
        expected = list(dataset.as_numpy_iterator())
        found = list(rd.Dataset.from_ray(dataset.to_ray()).as_numpy_iterator())
        assert [list(row) for row in found] == [["z", "a"]] * len(expected)
        assert [row["a"] for row in found] == [row["a"] for row in expected]
        assert [np.asarray(row["z"]).tolist() for row in found] == [np.asarray(row["z"]).tolist() for row in expected]
    alone = rd.Dataset.from_tensor_slices(["a", "bb", "d"]).batch(2)
    found = list(rd.Dataset.from_ray(alone.to_ray()).as_numpy_iterator())
    assert [row["item"].tolist() for row in found] == [["a", "bb"], ["d"]]


def test_what_ray_has_no_word_for_and_errors_of_elements_fail_the_execution() -> None:
    bad = rd.Dataset.range(3).map(lambda x: 1 // (int(x) - 1))
    windows, small = rd.Dataset.range(4).window(2), rd.Dataset.from_tensor_slices(torch.ones(3).bfloat16())
    for dataset in (small, windows, bad):
        with pytest.raises(Exception, match="Map it to float32 before to_ray|must be tensors, got datasets|division"):
            dataset.to_ray().take_all()
