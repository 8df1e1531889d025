"""Vocabularies and hashes."""

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
from raydist.text import Characters, HashBuckets, Split, Vocabulary
from raydist.text.vocabulary import bucket_of

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


TEXTS = st.lists(st.text(st.characters(codec="utf-8"), max_size=6), min_size=1, max_size=10)


@given(TEXTS, st.integers(1, 2**40), st.integers(0, 2**64 - 1), st.integers(0, 3))
def test_ids_are_the_hash_that_the_documentation_names(texts: list[str], buckets: int, salt: int, first: int) -> None:
    digests = [
        hashlib.blake2b(text.encode(), digest_size=8, salt=salt.to_bytes(8, "little")).digest() for text in texts
    ]
    expected = [first + int.from_bytes(digest, "little") % buckets for digest in digests]
    ids = HashBuckets(buckets, salt, first)(texts)
    assert ids.dtype == np.int64
    assert ids.tolist() == expected
    assert HashBuckets(buckets, salt, first)(texts[0]) == expected[0]


def test_buckets_never_change() -> None:
    for text, bucket in (("", 756), ("cat", 939), ("naïve 🙂", 57)):
        assert bucket_of(text, 1000) == HashBuckets(1000)(text) == bucket
    ids = HashBuckets(1000)(Split()(["cat dog", "", "cat"]))
    assert [row.tolist() for row in ids] == [[939, 465], [], [939]]
