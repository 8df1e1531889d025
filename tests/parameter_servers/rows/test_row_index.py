from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raydist.parameter_servers.rows.row_index import DirectIndex, GrowingRows, HashIndex, RowIndex, index_for


def test_rows_that_are_there_keep_their_values() -> None:
    rows = GrowingRows(2, torch.float32)
    rows.extend(3)
    rows.extend(4, fill=2.0)
    rows.extend(1, fill=9.0)
    rows.append(torch.tensor([[1.0, 5.0]]))
    assert (rows.count, rows.num_bytes) == (5, 5 * 2 * 4)
    assert rows.values.tolist() == [[0, 0], [0, 0], [0, 0], [2, 2], [1, 5]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_at_places(dtype: torch.dtype) -> None:
    rows, places = GrowingRows(3, dtype), torch.tensor([7, 0, 4])
    rows.put(places[:0], torch.empty(0, 3, dtype=dtype))
    rows.extend(10)
    values = torch.randn(3, 3, dtype=dtype)
    rows.put(places, values)
    assert torch.equal(rows.take(places.flip(0)), values.flip(0))
    rows.put(places, values.T)
    assert torch.equal(rows.values[places], values.T)
    rows.put(places[:0], values[:0])
    assert rows.values[[1, 2, 3, 5, 6, 8, 9]].eq(0).all()


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
    follow(HashIndex(), [[row * 199_999 for row in batch] for batch in batches])


@given(NUMBERS)
def test_a_direct_index_is_a_dict(batches: list[list[int]]) -> None:
    follow(DirectIndex(5001), batches)


def test_many_rows_that_come_at_once() -> None:
    rng = np.random.default_rng(0)
    follow(HashIndex(), [np.unique(rng.integers(0, 10**9, 50_000)).tolist(), [0, 10**9 - 1]])


def test_a_hash_index_stays_small() -> None:
    index = HashIndex()
    for begin in range(0, 200_000, 1000):
        index.add(np.arange(begin, begin + 1000) * 4999)
        assert index.num_bytes < 8 * (begin + 1000) + max(16 * (begin + 1000), 4096)


@pytest.mark.parametrize(("num_rows", "kind"), [(10**6, DirectIndex), (10**9, HashIndex)])
def test_small_tables_have_an_entry_for_each_row(num_rows: int, kind: type[RowIndex]) -> None:
    assert type(index_for(num_rows)) is kind
