from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from raydist.pipelines.elements.blocks import object_column
from raydist.text.convert import from_arrow, is_list, list_array, map_values, offsets_of, to_arrow

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
