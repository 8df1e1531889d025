from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import raydist as rd

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.filterwarnings("ignore")]  # Ray Data's own warnings


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
