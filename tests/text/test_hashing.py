from __future__ import annotations

import hashlib
import pickle
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from raydist.text import HashBuckets, Split
from raydist.text.hashing import bucket_of

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


@pytest.mark.parametrize(("text", "bucket"), [("", 756), ("cat", 939), ("naïve 🙂", 57)])
def test_buckets_never_change(text: str, bucket: int) -> None:
    assert bucket_of(text, 1000) == bucket
    assert HashBuckets(1000)(text) == bucket


def test_another_process_agrees() -> None:
    code = "import raydist as rd; print(rd.text.HashBuckets(10**9, salt=5)(['a', 'b']).tolist())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str(HashBuckets(10**9, salt=5)(["a", "b"]).tolist())


def test_buckets_fill_evenly() -> None:
    counts = Counter(HashBuckets(10)([str(number) for number in range(10_000)]).tolist())
    assert set(counts) == set(range(10))
    assert max(counts.values()) < 1.2 * min(counts.values())


def test_tokens_are_hashed_in_their_lists() -> None:
    ids = HashBuckets(1000)(Split()(["cat dog", "", "cat"]))
    assert [row.tolist() for row in ids] == [[939, 465], [], [939]]


@pytest.mark.parametrize("arguments", [(0,), (1.5,), (3, -1), (3, 2**64), (3, 0, -1)])
def test_arguments_are_checked(arguments: tuple[int, ...]) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=f"must be an int >= .*, got {arguments[-1]}"):
        HashBuckets(*arguments)


def test_ids_are_no_text() -> None:
    with pytest.raises(rd.SpecError, match="HashBuckets takes text or tokens, got int64"):
        HashBuckets(3)([1, 2])


def test_a_step_pickles() -> None:
    assert pickle.loads(pickle.dumps(HashBuckets(3, 4, 5))) == HashBuckets(3, 4, 5)
