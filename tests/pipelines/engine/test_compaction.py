"""Blocks of which a shuffle holds few rows: these rows are copied, so that the blocks can be freed."""

from __future__ import annotations

import weakref
from typing import Any, cast

import numpy as np
import pytest

from raydist.dataset import Dataset
from raydist.pipelines.elements.columns import KeptColumn, RemoteColumn, StoredColumn, concat_columns
from raydist.pipelines.engine import shuffle_buffer
from raydist.pipelines.engine.shuffle_buffer import sparse_slots
from tests.contracts.op import collect, iterate
from tests.pipelines.storing_executor import InStore, StoringExecutor


def held(*rows_of_blocks: list[int], num_rows: int = 10) -> RemoteColumn:
    """A column of some rows of blocks of `num_rows` rows of 80 bytes."""
    blocks = [RemoteColumn.of(KeptColumn(np.zeros((num_rows, 10)))) for _ in rows_of_blocks]
    parts = [block[np.array(rows, np.int64)] for block, rows in zip(blocks, rows_of_blocks, strict=True)]
    return cast(RemoteColumn, concat_columns(cast(Any, parts)))


def test_nothing_is_copied_while_most_rows_are_in_use() -> None:
    assert sparse_slots(held([0, 1, 2, 3, 4, 5, 6], [4, 5, 6, 7, 8, 9]), 0) == []
    assert sparse_slots(held([0], [1]), 2 * 80 * 20) == []


def test_rows_of_the_sparsest_blocks_are_copied_first(monkeypatch: pytest.MonkeyPatch) -> None:
    column = held([0, 1, 2, 3], [0], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 1], [3])
    assert [group.tolist() for group in sparse_slots(column, 0)] == [[0, 1, 2, 3, 4, 15, 16, 17]]
    monkeypatch.setattr(shuffle_buffer, "_COPY_BYTES", 160)
    assert [group.tolist() for group in sparse_slots(column, 0)] == [[4, 17], [15, 16], [0, 1, 2, 3]]
    monkeypatch.setattr(shuffle_buffer, "_MOST_COPIES", 1)
    assert [group.tolist() for group in sparse_slots(column, 0)] == [[4, 17]]


def test_a_shuffle_takes_little_more_than_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle_buffer, "_COPY_BYTES", 8 * 500)
    living: weakref.WeakSet[StoredColumn] = weakref.WeakSet()
    made = InStore.put.__func__  # type: ignore[attr-defined]

    def put(cls: type[InStore], column: Any) -> InStore:
        stored: InStore = made(cls, column)
        living.add(stored)
        return stored

    monkeypatch.setattr(InStore, "put", classmethod(put))
    dataset = Dataset.range(75_000).map(lambda x: x * 2).shuffle(10_000, seed=3).batch(100)
    expected = [row for batch in collect(iterate(dataset)) for row in batch.tolist()]
    for spare_bytes in (0, 1 << 30):
        monkeypatch.setattr(shuffle_buffer, "_SPARE_BYTES", spare_bytes)
        found, most = [], 0
        for number, batch in enumerate(iterate(dataset, StoringExecutor)):
            found += batch.tolist()
            if number > 250:
                most = max(most, sum(stored.shape[0] for stored in living))
        assert found == expected
        assert (most < 30_000) == (spare_bytes == 0), most
