from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from raydist.pipelines.elements.blocks import object_column
from raydist.text import PadTo, Split

IDS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6)


def column(rows: list[list[int]]) -> np.ndarray:
    """An object array of arrays, also where all have one length."""
    return object_column([np.array(row, dtype=np.int64) for row in rows])


@given(st.lists(IDS, min_size=1, max_size=6), st.integers(1, 8), st.integers(-1, 9))
def test_rows_are_cut_or_filled_up(rows: list[list[int]], length: int, pad_id: int) -> None:
    padded = PadTo(length, pad_id)(column(rows))
    assert padded.shape == (len(rows), length)
    assert padded.dtype == np.int64
    assert padded.tolist() == [(row + [pad_id] * length)[:length] for row in rows]
    assert [row[: len(ids)].tolist() for row, ids in zip(padded, rows, strict=True)] == [ids[:length] for ids in rows]
    assert PadTo(length, pad_id)(column(rows)[0]).tolist() == padded[0].tolist()


def test_arrays_are_padded_along_their_last_axis() -> None:
    assert PadTo(2)(np.array([[1, 2, 3], [4, 5, 6]])).tolist() == [[1, 2], [4, 5]]
    assert PadTo(3)(np.zeros((2, 2, 1), np.int32)).shape == (2, 2, 3)
    assert PadTo(2)(np.zeros((0, 5), np.int64)).shape == (0, 2)
    assert PadTo(2)([]).tolist() == [0, 0]


def test_tokens_need_ids_first() -> None:
    with pytest.raises(rd.SpecError, match=r"PadTo takes sequences of ids, got large_list.*by a Vocabulary"):
        PadTo(2)(Split()(["a b", "c"]))


@pytest.mark.parametrize("length", [0, -1, 1.5, "3"])
def test_a_length_is_positive(length: object) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="length must be an int >= 1"):
        PadTo(length)  # type: ignore[arg-type]  # the point of this test


def test_a_step_pickles() -> None:
    assert pickle.loads(pickle.dumps(PadTo(3, 1))) == PadTo(3, 1)
