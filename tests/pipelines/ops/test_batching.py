"""Batches, rows, and padding."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from functools import partial
from operator import call
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raydist as rd
from raydist.core.errors import SpecError
from raydist.dataset import Dataset
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.ops.padded_batch import Padding
from tests.contracts.op import collect, iterate
from tests.refused import check_refused


def test_elements_of_differing_shape_are_an_error_that_shows_both() -> None:
    items = collect(iterate(Dataset.range(6).map(lambda x: np.zeros(3 if x == 2 else 2)).batch(2)))
    assert items[0].shape == items[2].shape == (2, 2)
    assert items[1][0] == "SpecError"
    assert "must have one shape, got (3,) and, 1 elements later, (2,)" in items[1][1]
    words = Dataset.range(2).map(lambda i: np.array(["b", "c"], object) if i else "a")
    with pytest.raises(SpecError, match=r"one shape, got \(\) and, 1 elements later, \(2,\)"):
        list(words.batch(2))


def test_a_batch_is_its_receivers_own() -> None:
    source = np.ones((4, 2), np.float32)
    dataset = Dataset.from_tensor_slices(source).batch(2)
    for batch in dataset:
        assert isinstance(batch, torch.Tensor)
        batch.zero_()
    assert (source == 1).all()
    for array in dataset.as_numpy_iterator():
        array[:] = 0
    assert (source == 1).all()


def test_rows_come_one_by_one() -> None:
    dataset = Dataset.from_tensor_slices((np.arange(6).reshape(3, 2), [["a", "b"], ["c", "d"], ["e", "f"]])).unbatch()
    assert [(int(n), t) for n, t in dataset] == list(enumerate("abcdef"))
    ragged = Dataset.range(4).map(lambda x: np.arange(x), output_spec=TensorSpec((None,), "int64"))
    assert [int(x) for x in ragged.unbatch()] == [0, 0, 1, 0, 1, 2]
    boxes = np.empty((8, 0, 4), np.float32)
    batches = Dataset.from_tensor_slices({"x": np.arange(8), "boxes": boxes}).batch(4)
    for dataset in (batches.unbatch(), batches.rebatch(2).unbatch()):
        rows = list(dataset)
        assert [int(row["x"]) for row in rows] == list(range(8))
        assert {tuple(row["boxes"].shape) for row in rows} == {(0, 4)}, "rows without numbers"


def test_map_batches_gets_structures_of_arrays_and_may_change_the_count() -> None:
    sizes: list[int] = []

    def evens(x: np.ndarray) -> Any:
        sizes.append(len(x))
        return x[x % 2 == 0]

    assert [int(x) for x in Dataset.range(7).map_batches(evens, batch_size=4)] == [0, 2, 4, 6]
    assert sizes == [4, 3]


def lists(dataset: Dataset) -> list[list[int]]:
    return [batch.tolist() for batch in dataset]


def test_sizes_are_used_in_turn_and_one_of_zero_is_an_empty_batch() -> None:
    assert lists(Dataset.range(8).batch(4).rebatch([2, 1, 1])) == [[0, 1], [2], [3], [4, 5], [6], [7]]
    assert lists(Dataset.range(7).batch(2).rebatch(3, drop_remainder=True)) == [[0, 1, 2], [3, 4, 5]]
    assert lists(Dataset.range(2).batch(2).rebatch([0, 1])) == [[], [0], [], [1], []]
    assert lists(Dataset.range(2).batch(2).rebatch([1, 0])) == [[0], [], [1], []]
    assert lists(Dataset.range(3).batch(3).rebatch([2, 0, 1])) == [[0, 1], [], [2]]
    pairs = Dataset.range(1).map(lambda x: ([0.5, 1.5], "text")).batch(1).rebatch([1, 0])
    empty = list(pairs.as_numpy_iterator())[1]
    assert (empty[0].shape, empty[0].dtype, empty[1].shape) == ((0, 2), "float32", (0,))


def test_rows_tell_what_an_empty_batch_is_where_nothing_else_does() -> None:
    nothing = Dataset.range(3).filter(lambda x: False).map(lambda x: [0.5, 1.5])
    rows = nothing.concatenate(Dataset.range(1).map(lambda x: [0.5, 1.5]))
    unknown = nothing.take_while(lambda x: True).concatenate(Dataset.range(2).skip(0).map(lambda x: [0.5, 1.5]))
    for dataset in (rows, unknown):
        empty = list(dataset.batch(1).rebatch([1, 0]).as_numpy_iterator())[1]
        assert (empty.shape, empty.dtype) == ((0, 2), "float32")


RAGGED = Dataset.range(1, 5).map(lambda n: np.full(n, n), output_spec=TensorSpec((None,), "int64"))


def test_padding() -> None:
    assert [batch.tolist() for batch in RAGGED.padded_batch(2)] == [[[1, 0], [2, 2]], [[3, 3, 3, 0], [4, 4, 4, 4]]]
    batches = list(RAGGED.padded_batch(3, padded_shapes=(5,), padding_values=-1))
    assert batches[0].tolist() == [[1, -1, -1, -1, -1], [2, 2, -1, -1, -1], [3, 3, 3, -1, -1]]
    assert [batch.shape for batch in batches] == [(3, 5), (1, 5)]
    assert [batch.shape for batch in RAGGED.padded_batch(3, [-1], drop_remainder=True)] == [(3, 3)]


def test_nests_and_text() -> None:
    dataset = RAGGED.map(lambda row: {"row": row, "words": ["x"] * len(row), "n": len(row)})
    shapes = {"row": (None,), "words": [5], "n": ()}
    (batch,) = dataset.take(2).padded_batch(2, shapes, {"row": 9, "words": None, "n": None}).as_numpy_iterator()
    assert batch["row"].tolist() == [[1, 9], [2, 2]]
    assert batch["words"].tolist() == [["x", "", "", "", ""], ["x", "x", "", "", ""]]
    assert batch["n"].tolist() == [1, 2]


def test_what_does_not_fit_is_an_error_in_its_place() -> None:
    for shapes, value, error, message in (
        ((1,), None, "DataLossError", "must hold every element, got elements up to"),
        ((2, 2), None, "InvalidArgumentError", "must have 1 dimensions"),
        (None, 0.5, "SpecError", "must be one scalar of int64, got 0.5"),
        (None, "x", "SpecError", "must be one scalar of int64"),
        (None, [1, 2], "SpecError", "must be one scalar of int64"),
    ):
        items = collect(iterate(RAGGED.skip(1).padded_batch(2, shapes, value)))
        assert [item[0] for item in items] == [error, error], message
        assert message in items[0][1]
    (item,) = collect(iterate(Dataset.zip(RAGGED, RAGGED).padded_batch(4, ((5,),))))
    assert item[0] == "InvalidArgumentError"
    assert "padded_shapes must be a nest like the element" in item[1]
    ranks = Dataset.range(2).map(lambda n: np.ones((1,) * int(n + 1)))
    (item,) = collect(iterate(ranks.padded_batch(2)))
    assert "must have one rank, got [1, 2]" in item[1]


def test_python_numbers_fill_what_they_fit() -> None:
    fitting: list[tuple[str, Any]] = [("float64", 2), ("float32", 0.5), ("uint8", 7), ("bool", True)]
    for dtype, value in fitting:
        padded = Padding(values=value).batch(block_of_rows([np.ones(1, dtype), np.ones(2, dtype)]))
        assert padded.columns[0].dtype == dtype
        assert padded.columns[0][0, 0].tolist() == [1, value]
        assert padded.specs == (TensorSpec((2, 2), dtype),)
    wrong: list[tuple[str, Any]] = [("uint8", -1), ("uint8", 300), ("int8", 128), ("int32", 0.5)]
    for dtype, value in wrong:
        with pytest.raises(SpecError, match=rf"must be one scalar of {dtype}, got {value}"):
            Padding(values=value).batch(block_of_rows([np.ones(1, dtype), np.ones(2, dtype)]))


# --- leaves that differ in shape, and batches of a function -----------------------------------------------------------

SAMPLES: list[dict[str, Any]] = [
    {"id": i, "name": f"{i} ä", "image": np.full((3, 4 + i % 3), i, np.float32)} for i in range(7)
]
RAGGED_BATCHES = Dataset.from_torch(SAMPLES).ragged_batch(4)


def paired(elements: list[Any]) -> Any:
    return tuple(zip(*[(each["image"], {"id": each["id"]}) for each in elements], strict=True))


def test_leaves_of_differing_shape_become_lists_of_tensors() -> None:
    first, last = list(RAGGED_BATCHES)
    assert first["id"].tolist() == [0, 1, 2, 3]
    assert first["name"].tolist() == ["0 ä", "1 ä", "2 ä", "3 ä"]
    assert [tuple(image.shape) for image in first["image"]] == [(3, 4), (3, 5), (3, 6), (3, 4)]
    assert all(type(image) is torch.Tensor for image in last["image"])
    assert [int(image[0, 0]) for image in last["image"]] == [4, 5, 6]
    assert RAGGED_BATCHES.cardinality() == 2
    assert len(list(Dataset.from_torch(SAMPLES).ragged_batch(4, drop_remainder=True))) == 1
    spec = RAGGED_BATCHES.element_spec
    assert str(spec["image"]) == "RaggedSpec(shape=(None, 3, None), dtype=float32)"
    assert spec["id"] == rd.TensorSpec((None,), "int64")


def test_what_is_declared_decides_and_not_the_values_of_a_batch() -> None:
    alike = Dataset.range(3).map(lambda x: np.full(2, x))
    assert type(next(iter(alike.ragged_batch(3)))) is list
    declared = Dataset.range(3).map(lambda x: np.full(2, x), output_spec=rd.TensorSpec((2,), "int64"))
    assert next(iter(declared.ragged_batch(3))).shape == (3, 2)
    of_any_length = Dataset.range(3).map(lambda x: np.full(2, x), output_spec=rd.TensorSpec((None,), "int64"))
    assert type(next(iter(of_any_length.ragged_batch(3)))) is list
    assert next(iter(Dataset.from_tensor_slices(np.zeros((3, 2))).ragged_batch(3))).shape == (3, 2)


def test_lists_are_taken_apart_again_and_stay_lists_in_functions() -> None:
    rows = list(RAGGED_BATCHES.unbatch())
    assert [tuple(row["image"].shape) for row in rows] == [np.shape(sample["image"]) for sample in SAMPLES]
    mapped = RAGGED_BATCHES.map(lambda batch: {**batch, "count": len(batch["image"])})
    assert [int(batch["count"]) for batch in mapped] == [4, 3]
    assert all(type(batch["image"]) is list for batch in mapped)
    widths = Dataset.range(4).map(np.arange).batch(2, collate=list)
    assert [[len(row) for row in batch] for batch in widths] == [[0, 1], [2, 3]]
    assert [batch.num_rows for batch in RAGGED_BATCHES.arrow_batches()] == [4, 3]


def test_what_is_handed_out_is_private() -> None:
    for cached in (RAGGED_BATCHES.cache(), Dataset.from_torch(SAMPLES).batch(4, collate=paired).cache().repeat(1)):
        for _ in range(2):
            batch = next(iter(cached))
            image = batch["image"][1] if isinstance(batch, dict) else batch[0][1]
            assert float(image[0, 0]) == 1
            image.fill_(9)


def test_a_collate_function_gets_tensors_and_its_result_is_the_batch() -> None:
    kinds: set[type] = set()

    def stacked(elements: list[Any]) -> Any:
        kinds.update(type(value) for element in elements for value in element.values())
        return {"ids": torch.stack([each["id"] for each in elements]), "names": [each["name"] for each in elements]}

    batches = list(Dataset.from_torch(SAMPLES).batch(4, collate=stacked))
    assert kinds == {torch.Tensor, str}
    assert [batch["ids"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6]]
    assert batches[1]["names"] == ["4 ä", "5 ä", "6 ä"]
    images, targets = next(iter(Dataset.from_torch(SAMPLES).batch(4, collate=paired)))
    assert [tuple(image.shape) for image in images] == [(3, 4), (3, 5), (3, 6), (3, 4)]
    assert [int(target["id"]) for target in targets] == [0, 1, 2, 3]
    (images, _), *_ = Dataset.from_torch(SAMPLES).batch(4, collate=paired).as_numpy_iterator()
    assert type(images[0]) is np.ndarray


def test_the_spec_of_a_collated_batch_is_that_of_first_elements() -> None:
    ds = Dataset.from_torch(SAMPLES)
    spec = ds.batch(4, collate=lambda them: {"x": torch.stack([each["id"] for each in them]), "all": them}).element_spec
    assert spec["x"] == rd.TensorSpec((None,), "int64")
    assert str(spec["all"]).startswith("CollatedSpec")
    Pair = namedtuple("Pair", "first rest")
    (batch,) = Dataset.range(3).batch(3, collate=lambda them: Pair(them[0], them[1:]))
    assert (int(batch.first), [int(x) for x in batch.rest]) == (0, [1, 2])
    (number,) = Dataset.range(3).batch(3, collate=lambda them: slice(len(them)))
    assert number == slice(3), "any object"


def test_nothing_looks_into_a_collated_batch_and_lists_are_not_stacked(tmp_path: Path) -> None:
    stacking: list[Callable[[Dataset], Dataset]] = [
        *(lambda ds: ds.rebatch(2), lambda ds: ds.batch(2), lambda ds: ds.padded_batch(2))
    ]
    looking: list[Callable[[Dataset], Dataset]] = [
        lambda ds: ds.map(lambda *batch: 1),
        lambda ds: ds.filter(lambda *batch: True),
        lambda ds: ds.scan(0, lambda total, *batch: (total, 1)),
        lambda ds: ds.flat_map(lambda *batch: Dataset.range(1)),
        lambda ds: ds.unbatch(),
        lambda ds: ds.ragged_batch(2),
    ]
    collated = Dataset.from_torch(SAMPLES).batch(4, collate=paired)

    def first(dataset: Dataset, further: Callable[[Dataset], Dataset]) -> object:
        return next(iter(further(dataset)))

    cases: list[tuple[Callable[[], object], str]] = [
        *((partial(first, collated, further), "must be the last look into elements") for further in stacking + looking),
        *((partial(first, RAGGED_BATCHES, further), r"call unbatch\(\) first") for further in stacking),
        (lambda: collated.save(str(tmp_path / "collated")), "last look into elements"),
        (lambda: RAGGED_BATCHES.save(str(tmp_path / "ragged")), "list of tensors"),
        (lambda: list(RAGGED_BATCHES.cache(str(tmp_path / "cache"))), "list of tensors"),
    ]
    check_refused(call, cases, SpecError)


def test_an_error_of_the_function_takes_the_place_of_its_batch() -> None:
    def fails_on_two(elements: list[Any]) -> Any:
        if 2 in elements:
            raise KeyError("two")
        return len(elements)

    iterator = iter(Dataset.range(6).batch(2, collate=fails_on_two))
    assert next(iterator) == 2
    with pytest.raises(KeyError, match="two") as caught:
        next(iterator)
    assert "fails_on_two for 2 elements" in "".join(caught.value.__notes__)
    assert list(iterator) == [2]


OPTIONAL = [(number, None if number % 3 == 1 else float(number)) for number in range(20)]


def filled(number: Any, label: Any) -> Any:
    return number, np.float32(-1) if label is None else label


def values(dataset: Any) -> list[Any]:
    return [(int(number), None if label is None else float(label)) for number, label in dataset]


def test_none_among_values_reaches_the_map_that_fills_it() -> None:
    ways: list[Callable[[Dataset], Dataset]] = [
        lambda ds: ds,
        lambda ds: ds.shuffle(5, seed=1),
        lambda ds: ds.shuffle(100, seed=1),
        lambda ds: ds.cache(),
        lambda ds: ds.filter(lambda *_: True).prefetch(2),
        lambda ds: ds.map(lambda *pair: pair, num_parallel_calls=3, deterministic=False),
    ]
    for number, before in enumerate(ways):
        ds = before(Dataset.from_torch(OPTIONAL))
        assert sorted(values(ds), key=lambda pair: pair[0]) == OPTIONAL, f"way {number}"
        got = sorted(values(ds.map(filled).batch(4).unbatch()))
        assert got == [(x, -1.0 if label is None else label) for x, label in OPTIONAL], f"way {number}"


def test_a_shuffle_of_none_among_values_is_that_of_other_values_and_resumes_anywhere() -> None:
    ds = Dataset.from_torch(OPTIONAL).shuffle(5, seed=1, reshuffle_each_iteration=False)
    plain = Dataset.range(20).shuffle(5, seed=1, reshuffle_each_iteration=False)
    whole = values(ds)
    assert [number for number, _ in whole] == [int(number) for number in plain]
    iterator = iter(ds)
    for drawn in range(21):
        other = iter(ds)
        other.load_state_dict(iterator.state_dict())
        assert values(other) == whole[drawn:]
        next(iterator, None)


def test_none_and_values_make_no_batch() -> None:
    for batched, named in (("batch", "batch"), ("padded_batch", "row_groups"), ("ragged_batch", "ragged_batch")):
        with pytest.raises(SpecError, match="one structure.*Put a value in the place of None in a map") as caught:
            next(iter(getattr(Dataset.from_torch(OPTIONAL), batched)(4)))
        assert caught.value.__notes__ == [f"In {named}-2."]
    (batch, *_) = Dataset.from_torch(OPTIONAL).batch(3, collate=lambda them: [label for _, label in them])
    assert batch == [torch.tensor(0.0), None, torch.tensor(2.0)]
