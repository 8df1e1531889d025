from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from raydist.text import Characters, Split

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
