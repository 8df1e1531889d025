from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.parameter_servers.rows.row_index import DirectIndex, HashIndex, RowIndex, index_for

NUMBERS = st.lists(st.lists(st.integers(0, 5000), max_size=400, unique=True), max_size=8)


def follow(index: RowIndex, batches: list[list[int]]) -> None:
    """Do to the index what is done to a dict."""
    known: dict[int, int] = {}
    for batch in batches:
        rows = np.array(batch, np.int64)
        assert index.find(rows).tolist() == [known.get(row, -1) for row in batch]
        new = [row for row in batch if row not in known]
        places = index.add(np.array(new, np.int64))
        known.update(zip(new, places.tolist(), strict=True))
    assert index.rows().tolist() == list(known)
    assert list(known.values()) == list(range(len(known)))
    assert index.find(np.array(list(known), np.int64)).tolist() == list(known.values())


@given(NUMBERS)
def test_a_hash_index_is_a_dict(batches: list[list[int]]) -> None:
    follow(HashIndex(10**9), [[row * 199_999 for row in batch] for batch in batches])


@given(NUMBERS)
def test_a_direct_index_is_a_dict(batches: list[list[int]]) -> None:
    follow(DirectIndex(5001), batches)


def test_many_rows_that_come_at_once() -> None:
    rng = np.random.default_rng(0)
    follow(HashIndex(10**9), [np.unique(rng.integers(0, 10**9, 50_000)).tolist(), [0, 10**9 - 1]])


def test_a_hash_index_stays_small() -> None:
    index = HashIndex(10**9)
    for begin in range(0, 200_000, 1000):
        index.add(np.arange(begin, begin + 1000) * 4999)
        assert index.num_bytes < 8 * (begin + 1000) + max(16 * (begin + 1000), 4096)


@pytest.mark.parametrize(("num_rows", "kind"), [(10**6, DirectIndex), (10**9, HashIndex)])
def test_small_tables_have_an_entry_for_each_row(num_rows: int, kind: type[RowIndex]) -> None:
    assert type(index_for(num_rows)) is kind
