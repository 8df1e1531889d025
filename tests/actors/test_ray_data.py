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
    rows = list(rd.Dataset.from_ray(squares).as_numpy_iterator())
    assert [int(row["x"]) for row in rows] == list(range(100))
    assert rows[7]["text"] == "7"
    assert rows[7]["square"].tolist() == [[49, 49], [49, 49]]


def test_the_spec_is_that_of_the_rows(squares: Any) -> None:
    spec = rd.Dataset.from_ray(squares).element_spec
    assert spec == {
        "x": rd.TensorSpec((), "int64"),
        "text": rd.TensorSpec((), "U"),
        "square": rd.TensorSpec((2, 2), "int64"),
    }


def test_only_a_materialised_dataset_has_a_length(squares: Any) -> None:
    assert rd.Dataset.from_ray(squares).cardinality() == rd.UNKNOWN_CARDINALITY
    assert len(rd.Dataset.from_ray(squares.materialize())) == 100


def test_the_users_dataset_keeps_its_settings(squares: Any) -> None:
    next(rd.Dataset.from_ray(squares).as_numpy_iterator())
    assert squares.context.execution_options.preserve_order is False


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


def test_a_null_stands_in_its_place() -> None:
    dataset = rd.Dataset.from_ray(ray.data.from_arrow(pa.table({"x": [1, None, 3]})))
    items = collect(iterate(dataset))
    assert [is_error(item) for item in items] == [False, True, False]


def test_an_error_in_ray_ends_the_pass() -> None:
    def fail(row: dict[str, Any]) -> dict[str, Any]:
        raise ZeroDivisionError("bad row")

    dataset = rd.Dataset.from_ray(ray.data.from_arrow(pa.table({"x": [1, 2]})).map(fail))
    iterator = dataset.as_numpy_iterator()
    with pytest.raises(RayTaskError, match="ZeroDivisionError: bad row") as caught:
        next(iterator)
    assert "the dataset of from_ray" in str(caught.value.__notes__)
    assert list(iterator) == []


def test_something_else_is_refused() -> None:
    with pytest.raises(rd.SpecError, match="from_ray needs a ray.data.Dataset, got 3"):
        rd.Dataset.from_ray(3)


# --- Dataset.to_ray ---------------------------------------------------------------------------------------------------


def test_elements_are_rows_in_order() -> None:
    dataset = rd.Dataset.range(1000).map(lambda x: {"x": x, "image": np.full((2, 3), x)})
    rows = dataset.to_ray().take_all()
    assert [row["x"] for row in rows] == list(range(1000))
    assert rows[5]["image"].tolist() == [[5] * 3] * 2


@pytest.mark.parametrize(
    ("make", "columns"),
    [(lambda x: x, ["item"]), (lambda x: (x, b"a"), ["item_0", "item_1"]), (lambda x: {"a": {"b": x}}, ["a.b"])],
)
def test_columns_are_named_by_the_leaves(make: Any, columns: list[str]) -> None:
    assert rd.Dataset.range(3).map(make).to_ray().columns() == columns


def test_every_execution_reads_the_same_epoch() -> None:
    dataset = rd.Dataset.range(50).shuffle(50, seed=1)
    rows = dataset.to_ray()
    first, again, second = ([row["item"] for row in source.take_all()] for source in (rows, rows, dataset.to_ray()))
    assert first == again != second
    assert [int(x) for x in rd.Dataset.range(50).shuffle(50, seed=1)] == first


def test_there_and_back() -> None:
    dataset = rd.Dataset.range(20).map(lambda x: {"x": x, "text": str(x)})
    assert list(rd.Dataset.from_ray(dataset.to_ray()).as_numpy_iterator()) == list(dataset.as_numpy_iterator())


def batched_text(kind: str) -> rd.Dataset:
    words = np.array(["a", "bb", "", "c\0", "d"], object)
    if kind == "bytes":
        words = np.array([word.encode() for word in words], object)
    elements = rd.Dataset.from_tensor_slices({"z": words, "a": np.arange(5)})
    if kind == "alone":
        return elements.map(lambda e: e["z"]).batch(2)
    if kind == "ragged":
        return elements.map(lambda e: {"z": words[: int(e["a"])], "a": e["a"]})
    return elements.batch(2).map(lambda e: {"z": e["z"], "a": e["a"].sum()})


@pytest.mark.parametrize("kind", ["str", "bytes", "ragged", "alone"])
def test_batched_text_there_and_back(kind: str) -> None:
    dataset = batched_text(kind)
    expected = list(dataset.as_numpy_iterator())
    found = list(rd.Dataset.from_ray(dataset.to_ray()).as_numpy_iterator())
    if kind == "alone":
        found = [row["item"] for row in found]
    else:
        assert [list(row) for row in found] == [["z", "a"]] * len(expected)
        assert [row["a"] for row in found] == [row["a"] for row in expected]
        found, expected = ([row["z"] for row in rows] for rows in (found, expected))
    assert [row.tolist() for row in found] == [row.tolist() for row in expected]


def test_what_ray_has_no_word_for_says_so() -> None:
    for dataset in (rd.Dataset.from_tensor_slices(torch.ones(3).bfloat16()), rd.Dataset.range(4).window(2)):
        with pytest.raises(Exception, match="Map it to float32 before to_ray|must be tensors, got datasets"):
            dataset.to_ray().take_all()


def test_an_error_of_an_element_fails_the_execution() -> None:
    with pytest.raises(Exception, match="division"):
        rd.Dataset.range(3).map(lambda x: 1 // (int(x) - 1)).to_ray().take_all()
