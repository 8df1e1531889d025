"""Splitting and padding, vocabularies and hashes."""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from raydist.pipelines.elements.blocks import object_column
from raydist.text import Chain, Characters, HashBuckets, Pad, Split, TextStep, Vocabulary
from raydist.text.step import to_arrow
from raydist.text.vocabulary import bucket_of

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


def test_empty_strings_and_what_cannot_be_split() -> None:
    for step in (Split(), Split(","), Characters()):
        assert rows(step(["", "a", ""]))[1] == ["a"]
        assert step([]).shape == (0,)
        assert step("").tolist() == ([""] if step == Split(",") else [])
        with pytest.raises(rd.SpecError, match="takes text, got large_list"):
            step(Split()(["a b", "c"]))
    separators: list[Any] = ["", b",", 3]
    for separator in separators:
        with pytest.raises(rd.InvalidArgumentError, match=r"separator must be a str .* rd.text.Characters"):
            Split(separator)


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


LINES = ["to be or not", "", "to  be", "question 水"]
ENCODE = Chain((Split(), Vocabulary(("to", "be", "not")), Pad(4)))


def test_a_dataset_is_encoded_by_element_by_batch_and_by_map_batches() -> None:
    lines = rd.Dataset.from_tensor_slices(LINES)
    expected = [[2, 3, 1, 4], [0, 0, 0, 0], [2, 3, 0, 0], [1, 1, 0, 0]]
    assert ENCODE(LINES).tolist() == [ENCODE(line).tolist() for line in LINES] == expected
    assert Split()(np.array([["a b", "c"]])).shape == (1, 2), "arrays keep their shape"
    assert ENCODE(LINES).flags.writeable
    assert Vocabulary(("to",))(LINES).flags.writeable
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


WORDS = st.text(st.sampled_from("abé水") | st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=4)


@given(st.lists(WORDS, max_size=8, unique=True), st.lists(WORDS, min_size=1, max_size=8), st.integers(1, 3))
def test_ids_are_those_of_a_dict(terms: list[str], texts: list[str], buckets: int) -> None:
    vocabulary = Vocabulary(tuple(terms), buckets)
    ids = vocabulary(texts)
    for text, id_ in zip(texts, ids.tolist(), strict=True):
        assert id_ == 1 + buckets + terms.index(text) if text in terms else 1 <= id_ <= buckets
    assert vocabulary(texts[0]) == ids[0]


@given(st.lists(WORDS, max_size=8, unique=True))
def test_terms_come_back_from_ids_and_files(tmp_path_factory: pytest.TempPathFactory, terms: list[str]) -> None:
    vocabulary = Vocabulary(tuple(terms), 2)
    assert not terms or vocabulary.terms_of(vocabulary(terms)).tolist() == terms
    path = tmp_path_factory.mktemp("vocabulary") / "terms.txt"
    vocabulary.save(path)
    assert Vocabulary.from_file(path, num_oov_buckets=2) == vocabulary


@given(st.lists(st.text(st.sampled_from("ab c"), max_size=8), max_size=10), st.integers(1, 3), st.integers(1, 3))
def test_terms_are_built_from_counts(texts: list[str], min_count: int, max_terms: int) -> None:
    counts = Counter(word for text in texts for word in text.split())
    expected = sorted((-count, word) for word, count in counts.items() if count >= min_count)
    built = Vocabulary.build(texts, split=Split(), min_count=min_count, max_terms=max_terms)
    assert built.terms == tuple(word for _, word in expected[:max_terms])


def test_terms_are_built_from_datasets_batched_or_not() -> None:
    lines = rd.Dataset.from_tensor_slices([b"a b", b"b c", b"b"])
    assert Vocabulary.build(lines, split=Split()).terms == ("b", "a", "c")
    assert Vocabulary.build(lines.batch(2), split=Split()).terms == ("b", "a", "c")
    assert Vocabulary.build(lines).terms == ("a b", "b", "b c")
    assert Vocabulary.build(lines.map(Split())).terms == ("b", "a", "c")


def test_ids_leave_room_for_padding_and_the_unknown() -> None:
    vocabulary = Vocabulary(("x", "y"), num_oov_buckets=3)
    assert vocabulary.size == 6
    assert vocabulary(["x", "y"]).tolist() == [4, 5]
    assert {int(vocabulary(word)) for word in "abcdefgh"} == {1, 2, 3}
    assert vocabulary.terms_of([[0, 1], [5, 4]]).tolist() == [["", "[UNK]"], ["y", "x"]]
    assert [row.tolist() for row in vocabulary(Characters()(["xy", "", "yx"]))] == [[4, 5], [], [5, 4]]
    assert pickle.loads(pickle.dumps(vocabulary)) == vocabulary
    assert len(pickle.dumps(vocabulary)) < 200  # without what it has cached


def test_arguments_are_checked(tmp_path: Path) -> None:
    def save(*terms: str) -> None:
        Vocabulary(terms).save(tmp_path / "terms.txt")

    unknown = r"one of the 1 terms .*, got 'b'. num_oov_buckets=1"
    cases: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
        (Vocabulary(("a",), num_oov_buckets=0), (["a", "b"],), unknown),
        (Chain, ((),), "Chain needs a tuple of one step"),
        (Chain, ((str.split,),), "Chain needs a tuple of one step"),
        (Vocabulary, (("a", "b", "a"), 1), "must differ, got 'a' 2 times"),
        (Vocabulary, (("a", b"b"), 1), "must be str, got b'b'"),
        (Vocabulary, (("a",), -1), "num_oov_buckets must be an int >= 0, got -1"),
        (partial(Vocabulary.build, max_terms=0), (["a"],), "must be >= 1, got 0"),
        (partial(Vocabulary.build, min_count=0), (["a"],), "must be >= 1, got 0"),
        (save, ("a\nb",), "without line breaks"),
        (save, ("a\r",), "without line breaks"),
        (Vocabulary(("a", "b")).terms_of, ([0, 4],), "0 to 3, got 4"),
        (Vocabulary(("a", "b")).terms_of, ([-1],), "0 to 3, got -1"),
        (HashBuckets, (0,), "must be an int >= .*, got 0"),
        (HashBuckets, (1.5,), "must be an int >= .*, got 1.5"),
        (HashBuckets, (3, -1), "must be an int >= .*, got -1"),
        (HashBuckets, (3, 2**64), f"must be an int >= .*, got {2**64}"),
        (HashBuckets, (3, 0, -1), "must be an int >= .*, got -1"),
    ]
    for function, arguments, message in cases:
        with pytest.raises(rd.InvalidArgumentError, match=message):
            function(*arguments)
    with pytest.raises(rd.SpecError, match="HashBuckets takes text or tokens, got int64"):
        HashBuckets(3)([1, 2])


def test_files_with_other_line_ends_or_encodings(tmp_path: Path) -> None:
    (tmp_path / "dos.txt").write_bytes(b"a\r\nb")
    assert Vocabulary.from_file(tmp_path / "dos.txt").terms == ("a", "b")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(rd.InvalidArgumentError, match=r"must be UTF-8, got .*latin.txt"):
        Vocabulary.from_file(tmp_path / "latin.txt")
    with pytest.raises(rd.NotFoundError, match="none.txt"):
        Vocabulary.from_file(tmp_path / "none.txt")


HASHED = st.lists(st.text(st.characters(codec="utf-8"), max_size=6), min_size=1, max_size=10)


@given(HASHED, st.integers(1, 2**40), st.integers(0, 2**64 - 1), st.integers(0, 3))
def test_ids_are_the_hash_that_the_documentation_names(texts: list[str], buckets: int, salt: int, first: int) -> None:
    digests = [
        hashlib.blake2b(text.encode(), digest_size=8, salt=salt.to_bytes(8, "little")).digest() for text in texts
    ]
    expected = [first + int.from_bytes(digest, "little") % buckets for digest in digests]
    ids = HashBuckets(buckets, salt, first)(texts)
    assert ids.dtype == np.int64
    assert ids.tolist() == expected
    assert HashBuckets(buckets, salt, first)(texts[0]) == expected[0]
    for text, bucket in (("", 756), ("cat", 939), ("naïve 🙂", 57)):  # buckets never change
        assert bucket_of(text, 1000) == HashBuckets(1000)(text) == bucket
    assert [row.tolist() for row in HashBuckets(1000)(Split()(["cat dog", "", "cat"]))] == [[939, 465], [], [939]]
