"""Steps, chains, conversions."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from raydist.pipelines.elements.blocks import object_column
from raydist.text import Chain, HashBuckets, Pad, Split, TextStep, Vocabulary
from raydist.text.step import from_arrow, is_list, list_array, map_values, offsets_of, to_arrow


@dataclass(frozen=True)
class Lengths(TextStep):
    def apply(self, array: pa.Array) -> pa.Array:
        return pc.utf8_length(array)


@dataclass(frozen=True)
class Totals(TextStep):
    takes_lists: ClassVar[bool] = True

    def apply(self, array: pa.Array) -> pa.Array:
        return pa.array([sum(row) for row in array.to_pylist()])


def test_a_step_takes_one_string_or_arrays_of_any_shape() -> None:
    assert Lengths()("abc") == 3
    assert Lengths()(["a", b"bb"]).tolist() == [1, 2]
    assert Lengths()(np.array([["a"], ["bb"]])).tolist() == [[1], [2]]


def test_a_step_on_lists_takes_the_last_axis() -> None:
    assert Totals()([1, 2, 3]) == 6
    assert Totals()([[1, 2], [3, 4]]).tolist() == [3, 7]


LINES = ["to be or not", "", "to  be", "question 水"]
ENCODE = Chain((Split(), Vocabulary(("to", "be", "not")), Pad(4)))


@given(st.lists(st.text(st.sampled_from("ab é\n"), max_size=10), min_size=1, max_size=6))
def test_a_chain_is_its_steps_in_turn(batch: list[str]) -> None:
    steps = (Split(), HashBuckets(50, first_id=1), Pad(3))
    values: object = batch
    for step in steps:
        values = step(values)
    assert Chain(steps)(batch).tolist() == values.tolist()  # type: ignore[attr-defined]  # an array


def test_one_string_and_a_batch_agree() -> None:
    assert ENCODE(LINES).tolist() == [[2, 3, 1, 4], [0, 0, 0, 0], [2, 3, 0, 0], [1, 1, 0, 0]]
    assert [ENCODE(line).tolist() for line in LINES] == ENCODE(LINES).tolist()


def test_a_dataset_is_encoded_by_element_by_batch_and_by_map_batches() -> None:
    lines = rd.Dataset.from_tensor_slices(LINES)
    expected = ENCODE(LINES).tolist()
    assert [ids.tolist() for ids in lines.map(ENCODE)] == expected
    assert [ids.tolist() for batch in lines.batch(3).map(ENCODE) for ids in batch] == expected
    assert [ids.tolist() for ids in lines.map_batches(ENCODE, batch_size=3)] == expected


def test_bad_utf_8_is_an_error_in_its_batch_alone() -> None:
    batches = iter(rd.Dataset.from_tensor_slices([b"to", b"be", b"or", b"\xff", b"not"]).batch(2).map(ENCODE))
    assert next(batches).tolist() == [[2, 0, 0, 0], [3, 0, 0, 0]]
    with pytest.raises(rd.InvalidArgumentError, match="UTF-8, got .* in row 1") as caught:
        next(batches)
    assert "element 1 of its input" in "".join(caught.value.__notes__)
    assert next(batches).tolist() == [[4, 0, 0, 0]]


def test_a_chain_begins_with_what_its_first_step_takes() -> None:
    assert Chain((Pad(2),))([5]).tolist() == [5, 0]


@pytest.mark.parametrize("steps", [(), (str.split,)])
def test_a_chain_has_steps(steps: tuple[object, ...]) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="Chain needs a tuple of one step"):
        Chain(steps)  # type: ignore[arg-type]  # the point of this test


def test_a_chain_pickles() -> None:
    assert pickle.loads(pickle.dumps(ENCODE)) == ENCODE


TEXTS = st.lists(st.text(st.characters(codec="utf-8"), max_size=5), max_size=6)


@given(TEXTS)
def test_text_comes_back(texts: list[str]) -> None:
    column = np.array([*texts, ""], dtype=object)
    assert from_arrow(*to_arrow(column)).tolist() == column.tolist()


@given(st.lists(TEXTS, min_size=1, max_size=4))
def test_lists_come_back(lists: list[list[str]]) -> None:
    outside = object_column([np.array(row, dtype=object) for row in lists])
    assert [row.tolist() for row in from_arrow(*to_arrow(outside))] == lists


@pytest.mark.parametrize("values", ["a", b"a", np.str_("a"), np.array("a")])
def test_one_string_has_no_shape(values: object) -> None:
    array, shape = to_arrow(values)
    assert shape == ()
    assert from_arrow(array, shape) == "a"


def test_arrays_keep_their_shape() -> None:
    grid = np.array([["a", "b", "c"], ["d", "e", "f"]])
    assert from_arrow(*to_arrow(grid)).tolist() == grid.tolist()


@pytest.mark.parametrize(
    ("ids", "shape"),
    [([1, 2], ()), ([[1, 2], [3, 4]], (2,)), (np.zeros((2, 0), int), (2,)), (np.zeros((0, 2), int), (0,))],
)
def test_folding_makes_lists_of_the_last_axis(ids: object, shape: tuple[int, ...]) -> None:
    array, found = to_arrow(ids, fold=True)
    assert is_list(array)
    assert found == shape
    expected = np.asarray(ids).reshape(-1, np.asarray(ids).shape[-1]).tolist() if np.asarray(ids).size else None
    assert expected is None or array.to_pylist() == expected
    assert len(array) == int(np.prod(shape))


def test_arrays_handed_out_may_be_written() -> None:
    ids = from_arrow(*to_arrow(np.arange(3)))
    ids[0] = 7
    assert ids.tolist() == [7, 1, 2]


def test_values_of_lists_are_mapped_in_place() -> None:
    lists = list_array([0, 2, 2], to_arrow([1, 2])[0])
    doubled = map_values(lists, lambda flat: to_arrow(flat.to_numpy() * 2)[0])
    assert doubled.to_pylist() == [[2, 4], []]
    assert offsets_of(doubled).tolist() == [0, 2, 2]


@pytest.mark.parametrize("bad", [b"caf\xe9", "\ud800", b"\xff"])
def test_what_is_not_utf_8_is_an_error_with_its_row(bad: object) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"must be valid UTF-8, got .* in row 2: .* Decode it in a map"):
        to_arrow(np.array(["a", "b", bad, "c"], dtype=object))
    with pytest.raises(rd.InvalidArgumentError, match="row 0"):
        to_arrow(bad)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["a", None], "got None in row 1"),
        (["a", 3], r"got 3 \(int\) in row 1"),
        (np.array([1.5]), "got an array of float64"),
        (object_column([np.zeros(2, int), np.zeros((2, 2), int)]), r"one dimension, got an array of shape \(2, 2\)"),
        ({"a": 1}, "got {'a': 1} .dict. in row 0"),
    ],
)
def test_other_values_are_named(values: object, message: str) -> None:
    with pytest.raises(rd.SpecError, match=message):
        to_arrow(values)


def test_a_single_value_is_no_sequence() -> None:
    with pytest.raises(rd.SpecError, match="A sequence is needed, got the single value 'a'"):
        to_arrow("a", fold=True)
