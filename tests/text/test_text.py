"""Splitting and padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from raydist.pipelines.elements.blocks import object_column
from raydist.text import Chain, Characters, HashBuckets, Pad, Split, TextStep, Vocabulary
from raydist.text.step import from_arrow, to_arrow

# Text of every kind of white space, and of letters of one to four bytes.
TEXT = st.text(
    st.sampled_from("ab,;é水🙂 \t\n\r\x1c\x85\u00a0\u2003\u3000") | st.characters(codec="utf-8"), max_size=12
)
BATCHES = st.lists(TEXT, min_size=1, max_size=8)


def rows(values: object) -> list[list[str]]:
    return [row.tolist() for row in values]  # type: ignore[attr-defined]  # an object array of arrays


@given(BATCHES, st.sampled_from([",", "é", "ab", " ", ", ", "🙂"]))
def test_text_splits_as_python_does_and_bytes_are_utf_8(batch: list[str], separator: str) -> None:
    expected: dict[TextStep, list[list[str]]] = {
        Split(): [text.split() for text in batch],
        Split(separator): [text.split(separator) for text in batch],
        Characters(): [list(text) for text in batch],
    }
    for step, tokens in expected.items():
        assert rows(step(batch)) == rows(step([text.encode() for text in batch])) == tokens
        assert step(batch[0]).tolist() == tokens[0]


def test_empty_strings_and_no_strings() -> None:
    for step in (Split(), Split(","), Characters()):
        assert rows(step(["", "a", ""]))[1] == ["a"]
        assert step([]).shape == (0,)
        assert step("").tolist() == ([""] if step == Split(",") else [])


def test_what_cannot_be_split() -> None:
    separators: list[Any] = ["", b",", 3]
    for separator in separators:
        with pytest.raises(rd.InvalidArgumentError, match=r"separator must be a str .* rd.text.Characters"):
            Split(separator)
    for step in (Split(), Characters()):
        with pytest.raises(rd.SpecError, match="takes text, got large_list"):
            step(Split()(["a b", "c"]))


IDS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6)


def column_of(rows: list[list[int]]) -> np.ndarray:
    """An object array of arrays, also where all have one length."""
    return object_column([np.array(row, dtype=np.int64) for row in rows])


@given(st.lists(IDS, min_size=1, max_size=6), st.integers(1, 8), st.integers(-1, 9))
def test_rows_are_cut_or_filled_up(rows: list[list[int]], length: int, pad_id: int) -> None:
    padded = Pad(length, pad_id)(column_of(rows))
    assert padded.shape == (len(rows), length)
    assert padded.dtype == np.int64
    assert padded.tolist() == [(row + [pad_id] * length)[:length] for row in rows]
    assert [row[: len(ids)].tolist() for row, ids in zip(padded, rows, strict=True)] == [ids[:length] for ids in rows]
    assert Pad(length, pad_id)(column_of(rows)[0]).tolist() == padded[0].tolist()


def test_arrays_are_padded_along_their_last_axis() -> None:
    assert Pad(2)(np.array([[1, 2, 3], [4, 5, 6]])).tolist() == [[1, 2], [4, 5]]
    assert Pad(3)(np.zeros((2, 2, 1), np.int32)).shape == (2, 2, 3)
    assert Pad(2)(np.zeros((0, 5), np.int64)).shape == (0, 2)
    assert Pad(2)([]).tolist() == [0, 0]
    with pytest.raises(rd.SpecError, match=r"Pad takes sequences of ids, got large_list.*by a Vocabulary"):
        Pad(2)(Split()(["a b", "c"]))
    lengths: list[Any] = [0, -1, 1.5, "3"]
    for length in lengths:
        with pytest.raises(rd.InvalidArgumentError, match="length must be an int >= 1"):
            Pad(length)


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
    assert Totals()([1, 2, 3]) == 6  # a step on lists takes the last axis
    assert Totals()([[1, 2], [3, 4]]).tolist() == [3, 7]


LINES = ["to be or not", "", "to  be", "question 水"]
ENCODE = Chain((Split(), Vocabulary(("to", "be", "not")), Pad(4)))


@given(st.lists(st.text(st.sampled_from("ab é\n"), max_size=10), min_size=1, max_size=6))
def test_a_chain_is_its_steps_in_turn(batch: list[str]) -> None:
    steps = (Split(), HashBuckets(50, first_id=1), Pad(3))
    values: Any = batch
    for step in steps:
        values = step(values)
    assert Chain(steps)(batch).tolist() == values.tolist()
    assert Chain((Pad(2),))([5]).tolist() == [5, 0]  # it begins with what its first step takes
    wrong: list[Any] = [(), (str.split,)]
    for others in wrong:
        with pytest.raises(rd.InvalidArgumentError, match="Chain needs a tuple of one step"):
            Chain(others)


def test_a_dataset_is_encoded_by_element_by_batch_and_by_map_batches() -> None:
    lines = rd.Dataset.from_tensor_slices(LINES)
    expected = [[2, 3, 1, 4], [0, 0, 0, 0], [2, 3, 0, 0], [1, 1, 0, 0]]
    assert ENCODE(LINES).tolist() == [ENCODE(line).tolist() for line in LINES] == expected
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


TEXTS = st.lists(st.text(st.characters(codec="utf-8"), max_size=5), max_size=6)


@given(TEXTS, st.lists(TEXTS, min_size=1, max_size=4))
def test_text_and_lists_come_back(texts: list[str], lists: list[list[str]]) -> None:
    column = np.array([*texts, ""], dtype=object)
    assert from_arrow(*to_arrow(column)).tolist() == column.tolist()
    outside = object_column([np.array(row, dtype=object) for row in lists])
    assert [row.tolist() for row in from_arrow(*to_arrow(outside))] == lists


def test_one_string_has_no_shape_and_arrays_keep_theirs() -> None:
    for value in ("a", b"a", np.str_("a"), np.array("a")):
        array, shape = to_arrow(value)
        assert shape == ()
        assert from_arrow(array, shape) == "a"
    grid = np.array([["a", "b", "c"], ["d", "e", "f"]])
    assert from_arrow(*to_arrow(grid)).tolist() == grid.tolist()
    ids = from_arrow(*to_arrow(np.arange(3)))
    ids[0] = 7  # what is handed out may be written
    assert ids.tolist() == [7, 1, 2]


def test_what_is_no_text_is_an_error_with_its_row() -> None:
    for bad in (b"caf\xe9", "\ud800", b"\xff"):
        with pytest.raises(
            rd.InvalidArgumentError, match=r"must be valid UTF-8, got .* in row 2: .* Decode it in a map"
        ):
            to_arrow(np.array(["a", "b", bad, "c"], dtype=object))
        with pytest.raises(rd.InvalidArgumentError, match="row 0"):
            to_arrow(bad)
    odd_shapes = object_column([np.zeros(2, int), np.zeros((2, 2), int)])
    others: list[tuple[Any, str]] = [
        (["a", None], "got None in row 1"),
        (["a", 3], r"got 3 \(int\) in row 1"),
        (np.array([1.5]), "got an array of float64"),
        (odd_shapes, r"one dimension, got an array of shape \(2, 2\)"),
        ({"a": 1}, "got {'a': 1} .dict. in row 0"),
    ]
    for values, message in others:
        with pytest.raises(rd.SpecError, match=message):
            to_arrow(values)
    with pytest.raises(rd.SpecError, match="A sequence is needed, got the single value 'a'"):
        to_arrow("a", fold=True)
