"""Columns of row ids against the values they name."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.pipelines.elements.blocks import Block, concat_blocks
from raydist.pipelines.elements.columns import (
    Column,
    KeptColumn,
    NestedColumn,
    RemoteColumn,
    alike,
    as_remote,
    in_memory,
    object_column,
    remote_of,
)
from raydist.pipelines.elements.rows import block_of_rows
from tests.pipelines.storing_executor import InStore

MAKERS: dict[str, Callable[[int], Column]] = {
    "scalars": lambda n: np.arange(n, dtype=np.int64),
    "tensors": lambda n: np.arange(6.0 * n).reshape(n, 2, 3),
    "bytes": lambda n: object_column([b"%d" % k * k for k in range(n)]),
    "ragged": lambda n: object_column([np.arange(k % 3) for k in range(n)]),
}


def stored(column: Column, way: str = "kept") -> RemoteColumn:
    return RemoteColumn.of(KeptColumn(column) if way == "kept" else InStore.put(column))


def assert_equal(found: Column, expected: Column) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    for mine, theirs in zip(found, expected, strict=True):
        assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("way", ["kept", "in store"])
@given(data=st.data())
def test_what_is_done_to_ids_is_done_to_values(kind: str, way: str, data: st.DataObject) -> None:
    parts = [MAKERS[kind](data.draw(st.integers(1, 6))) for _ in range(data.draw(st.integers(1, 3)))]
    values = (
        object_column([row for part in parts for row in part]) if kind in ("bytes", "ragged") else np.concatenate(parts)
    )
    blocks = [block_of_column(cast(Column, stored(part, way))) for part in parts]
    ids = cast(RemoteColumn, concat_blocks(blocks).columns[0])
    for _ in range(data.draw(st.integers(0, 4))):
        step = data.draw(st.sampled_from(["slice", "take", "pickle", "set"]))
        if step == "slice":
            start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(values))] * 2)))
            ids, values = ids[start:stop], values[start:stop]
        elif step == "pickle":
            ids = pickle.loads(pickle.dumps(ids))
        elif len(values):
            rows = np.array(data.draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=6)))
            if step == "take":
                ids, values = ids[rows], values[rows]
            else:
                ids, values = ids.copy(), values.copy()
                ids[rows], values[rows] = ids[rows[::-1]].copy(), values[rows[::-1]].copy()
    assert len(ids) == len(values)
    found = ids.values()
    for mine, theirs in zip(found, values, strict=True):
        assert np.array_equal(mine, theirs)
    assert [np.shape(row) for row in values if kind == "ragged"] == [s for s in ids.shapes_by_row() if kind == "ragged"]


def block_of_column(column: Column) -> Block:
    like = block_of_rows([0])
    return Block(like.structure, like.specs, (column,), len(column))


def test_batches_have_the_shape_of_their_values() -> None:
    values = np.arange(24.0).reshape(12, 2)
    ids = stored(values)
    batches = ids.batched(3, 4)
    assert (batches.shape, batches.ndim, len(batches), batches.nbytes) == ((3, 4, 2), 3, 3, values.nbytes)
    assert_equal(batches.values(), values.reshape(3, 4, 2))
    assert_equal(batches.element(1).values(), values[4:8])
    rows = batches.unbatched()
    assert rows is not None
    assert_equal(rows.values(), values)


@pytest.mark.parametrize("way", ["kept", "in store"])
def test_rows_of_stored_batches(way: str) -> None:
    values = np.arange(48.0).reshape(4, 6, 2)
    ids = stored(values, way)
    assert_equal(ids.element(2).values(), values[2])
    assert_equal(ids.element(2)[1:3].values(), values[2, 1:3])
    rows = ids[np.array([3, 0])].unbatched()
    assert rows is not None
    assert_equal(rows.values(), values[[3, 0]].reshape(12, 2))
    assert_equal(pickle.loads(pickle.dumps(rows[5:8])).values(), values[[3, 0]].reshape(12, 2)[5:8])


def test_what_has_no_rows_is_handed_out_as_it_is() -> None:
    text = stored(object_column([b"a", b"bc"]))
    assert text.element(1) == b"bc"
    assert stored(np.arange(3)).element(1) == 1
    ragged = stored(object_column([np.zeros(1), np.ones(2)]))
    assert ragged.element(1).tolist() == [1, 1]
    assert ragged.unbatched() is None


def test_batches_of_different_sizes_stand_in_one_column() -> None:
    values = np.arange(10)
    ids = stored(values)
    both = concat_blocks(
        [block_of_column(cast(Column, ids[:8].batched(2, 4))), block_of_column(cast(Column, ids[8:].batched(1, 2)))]
    )
    column = cast(RemoteColumn, both.columns[0])
    assert [row.tolist() for row in column.values()] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert column.shapes_by_row() == [(4,), (4,), (2,)]
    again = pickle.loads(pickle.dumps(column[1:]))
    assert [row.tolist() for row in again.values()] == [[4, 5, 6, 7], [8, 9]]
    first, second = alike(ids[:4].batched(1, 4), ids[4:6].batched(1, 2))
    first[np.array([0])] = second
    assert [row.tolist() for row in first.values()] == [[4, 5]]


def test_a_part_of_nested_rows_is_sent_alone() -> None:
    nested = NestedColumn(stored(np.arange(4_000.0), "in store").batched(4, 1_000))
    rows = RemoteColumn.of(nested).element(2)[10:12]
    sent = pickle.dumps(rows)
    assert len(sent) < 2_000
    assert pickle.loads(sent).values().tolist() == [2010, 2011]


def test_rows_of_this_process_are_sent_alone() -> None:
    sent = pickle.dumps(as_remote(np.arange(100_000))[7:9])
    assert len(sent) < 1_000
    assert pickle.loads(sent).values().tolist() == [7, 8]


def test_consecutive_rows_are_a_view_that_cannot_be_written() -> None:
    values = np.arange(12.0).reshape(6, 2)
    view = stored(values)[2:5].values()
    assert np.shares_memory(view, values)
    assert not view.flags.writeable
    assert stored(values)[np.array([1, 0])].values().flags.writeable


def test_what_is_not_named_is_let_go() -> None:
    columns = [KeptColumn(np.full(1, number)) for number in range(300)]
    slots = stored(np.zeros(1, np.int64)).copy()
    for column in columns:
        slots[np.array([0])] = RemoteColumn.of(column)
    assert slots.values().tolist() == [299]
    assert len(slots.stored) < 10
    assert len(slots[np.array([0])].stored) == 1


def test_in_memory_leaves_values_alone() -> None:
    values = np.arange(3)
    assert in_memory(values) is values
    assert in_memory(remote_of(KeptColumn(values), 1)).tolist() == [1, 2]


@pytest.mark.parametrize("kind", MAKERS)
def test_no_rows_have_dtype_and_shape(kind: str) -> None:
    values = MAKERS[kind](5)
    none = pickle.loads(pickle.dumps(stored(values, "in store")[2:2]))
    assert (none.dtype, len(none), none.nbytes) == (values.dtype, 0, 0)
    assert none.values().shape == (0, *values.shape[1:])


def test_any_dtype() -> None:
    import ml_dtypes

    for dtype in (np.bool_, np.complex64, "M8[s]", ml_dtypes.bfloat16):
        values = np.arange(4).astype(dtype)
        assert_equal(stored(values)[np.array([2, 2, 0])].values(), values[[2, 2, 0]])
    found: Any = stored(np.arange(2)).shape
    assert found == (2,)
