"""Splitting and padding."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from raydist.pipelines.elements.blocks import object_column
from raydist.text import Characters, Pad, Split

# Text of every kind of white space, and of letters of one to four bytes.
TEXT = st.text(
    st.sampled_from("ab,;é水🙂 \t\n\r\x1c\x85\u00a0\u2003\u3000") | st.characters(codec="utf-8"), max_size=12
)
BATCHES = st.lists(TEXT, min_size=1, max_size=8)


def rows(values: object) -> list[list[str]]:
    return [row.tolist() for row in values]  # type: ignore[attr-defined]  # an object array of arrays


@given(BATCHES)
def test_white_space_splits_as_python_does(batch: list[str]) -> None:
    assert rows(Split()(batch)) == [text.split() for text in batch]
    assert Split()(batch[0]).tolist() == batch[0].split()


@given(BATCHES, st.sampled_from([",", "é", "ab", " ", ", ", "🙂"]))
def test_a_separator_splits_as_python_does_and_joins_again(batch: list[str], separator: str) -> None:
    tokens = rows(Split(separator)(batch))
    assert tokens == [text.split(separator) for text in batch]
    assert [separator.join(row) for row in tokens] == batch


@given(BATCHES)
def test_characters_are_code_points_and_join_again(batch: list[str]) -> None:
    tokens = rows(Characters()(batch))
    assert tokens == [list(text) for text in batch]
    assert ["".join(row) for row in tokens] == batch


@given(BATCHES)
def test_bytes_are_utf_8(batch: list[str]) -> None:
    encoded = [text.encode() for text in batch]
    for step in (Split(), Split(","), Characters()):
        assert rows(step(encoded)) == rows(step(batch))


@pytest.mark.parametrize("step", [Split(), Split(","), Characters()])
def test_empty_strings_and_no_strings(step: rd.text.TextStep) -> None:
    assert rows(step(["", "a", ""]))[1] == ["a"]
    assert step([]).shape == (0,)
    assert step("").tolist() == ([""] if step == Split(",") else [])


def test_every_element_of_a_dataset_can_be_split() -> None:
    dataset = rd.Dataset.from_tensor_slices(["to be", "or"]).map(Split())
    assert [tokens.tolist() for tokens in dataset.as_numpy_iterator()] == [["to", "be"], ["or"]]


@pytest.mark.parametrize("separator", ["", b",", 3])
def test_a_separator_has_characters(separator: object) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"separator must be a str .* rd.text.Characters"):
        Split(separator)  # type: ignore[arg-type]  # the point of this test


@pytest.mark.parametrize("step", [Split(), Characters()])
def test_tokens_are_not_split_again(step: rd.text.TextStep) -> None:
    with pytest.raises(rd.SpecError, match="takes text, got large_list"):
        step(Split()(["a b", "c"]))


@pytest.mark.parametrize("step", [Split(), Split(","), Characters()])
def test_steps_pickle(step: rd.text.TextStep) -> None:
    assert pickle.loads(pickle.dumps(step)) == step


IDS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6)


def column(rows: list[list[int]]) -> np.ndarray:
    """An object array of arrays, also where all have one length."""
    return object_column([np.array(row, dtype=np.int64) for row in rows])


@given(st.lists(IDS, min_size=1, max_size=6), st.integers(1, 8), st.integers(-1, 9))
def test_rows_are_cut_or_filled_up(rows: list[list[int]], length: int, pad_id: int) -> None:
    padded = Pad(length, pad_id)(column(rows))
    assert padded.shape == (len(rows), length)
    assert padded.dtype == np.int64
    assert padded.tolist() == [(row + [pad_id] * length)[:length] for row in rows]
    assert [row[: len(ids)].tolist() for row, ids in zip(padded, rows, strict=True)] == [ids[:length] for ids in rows]
    assert Pad(length, pad_id)(column(rows)[0]).tolist() == padded[0].tolist()


def test_arrays_are_padded_along_their_last_axis() -> None:
    assert Pad(2)(np.array([[1, 2, 3], [4, 5, 6]])).tolist() == [[1, 2], [4, 5]]
    assert Pad(3)(np.zeros((2, 2, 1), np.int32)).shape == (2, 2, 3)
    assert Pad(2)(np.zeros((0, 5), np.int64)).shape == (0, 2)
    assert Pad(2)([]).tolist() == [0, 0]


def test_tokens_need_ids_first() -> None:
    with pytest.raises(rd.SpecError, match=r"Pad takes sequences of ids, got large_list.*by a Vocabulary"):
        Pad(2)(Split()(["a b", "c"]))


@pytest.mark.parametrize("length", [0, -1, 1.5, "3"])
def test_a_length_is_positive(length: object) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="length must be an int >= 1"):
        Pad(length)  # type: ignore[arg-type]  # the point of this test


def test_a_step_pickles() -> None:
    assert pickle.loads(pickle.dumps(Pad(3, 1))) == Pad(3, 1)
