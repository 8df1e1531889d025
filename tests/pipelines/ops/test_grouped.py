"""Batches of leaves that differ in shape (`ragged_batch`), and those of a function (`batch(collate=)`)."""

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
from tests.refused import check_refused

SAMPLES: list[dict[str, Any]] = [
    {"id": i, "name": f"{i} ä", "image": np.full((3, 4 + i % 3), i, np.float32)} for i in range(7)
]
RAGGED = Dataset.from_torch(SAMPLES).ragged_batch(4)


def paired(elements: list[Any]) -> Any:
    return tuple(zip(*[(each["image"], {"id": each["id"]}) for each in elements], strict=True))


def test_leaves_of_differing_shape_become_lists_of_tensors() -> None:
    first, last = list(RAGGED)
    assert first["id"].tolist() == [0, 1, 2, 3]
    assert first["name"].tolist() == ["0 ä", "1 ä", "2 ä", "3 ä"]
    assert [tuple(image.shape) for image in first["image"]] == [(3, 4), (3, 5), (3, 6), (3, 4)]
    assert all(type(image) is torch.Tensor for image in last["image"])
    assert [int(image[0, 0]) for image in last["image"]] == [4, 5, 6]
    assert RAGGED.cardinality() == 2
    assert len(list(Dataset.from_torch(SAMPLES).ragged_batch(4, drop_remainder=True))) == 1
    spec = RAGGED.element_spec
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
    rows = list(RAGGED.unbatch())
    assert [tuple(row["image"].shape) for row in rows] == [np.shape(sample["image"]) for sample in SAMPLES]
    mapped = RAGGED.map(lambda batch: {**batch, "count": len(batch["image"])})
    assert [int(batch["count"]) for batch in mapped] == [4, 3]
    assert all(type(batch["image"]) is list for batch in mapped)
    widths = Dataset.range(4).map(np.arange).batch(2, collate=list)
    assert [[len(row) for row in batch] for batch in widths] == [[0, 1], [2, 3]]
    assert [batch.num_rows for batch in RAGGED.arrow_batches()] == [4, 3]


def test_what_is_handed_out_is_private() -> None:
    for cached in (RAGGED.cache(), Dataset.from_torch(SAMPLES).batch(4, collate=paired).cache().repeat(1)):
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
        *((partial(first, RAGGED, further), r"call unbatch\(\) first") for further in stacking),
        (lambda: collated.save(str(tmp_path / "collated")), "last look into elements"),
        (lambda: RAGGED.save(str(tmp_path / "ragged")), "list of tensors"),
        (lambda: list(RAGGED.cache(str(tmp_path / "cache"))), "list of tensors"),
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
