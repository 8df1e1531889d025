from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from raydist.text import Chain, HashBuckets, PadTo, Split, Vocabulary

LINES = ["to be or not", "", "to  be", "question 水"]
ENCODE = Chain((Split(), Vocabulary(("to", "be", "not")), PadTo(4)))


@given(st.lists(st.text(st.sampled_from("ab é\n"), max_size=10), min_size=1, max_size=6))
def test_a_chain_is_its_steps_in_turn(batch: list[str]) -> None:
    steps = (Split(), HashBuckets(50, first_id=1), PadTo(3))
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
    assert Chain((PadTo(2),))([5]).tolist() == [5, 0]


@pytest.mark.parametrize("steps", [(), (str.split,)])
def test_a_chain_has_steps(steps: tuple[object, ...]) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="Chain needs a tuple of one step"):
        Chain(steps)  # type: ignore[arg-type]  # the point of this test


def test_a_chain_pickles() -> None:
    assert pickle.loads(pickle.dumps(ENCODE)) == ENCODE
