"""Blocks as Arrow record batches, and columns of row ids."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.nest import LEAF
from raydist.dataset import Dataset
from raydist.pipelines.elements.arrow import block_of_arrow, block_to_arrow
from raydist.pipelines.elements.blocks import Block, concat_blocks
from raydist.pipelines.elements.columns import (
    Column,
    KeptColumn,
    NestedColumn,
    RemoteColumn,
    alike,
    as_remote,
    object_column,
)
from raydist.pipelines.elements.rows import block_of_rows
from tests.contracts.op import same
from tests.pipelines.storing_executor import InStore

ROWS: dict[str, list[Any]] = {
    "numbers": [1, 2, 3],
    "half floats": [np.float16(1.5), np.float16(2)],
    "bools": [True, False, True],
    "complex": [1 + 2j, 3 - 1j],
    "bytes": [b"a", b"", b"\x00\xff"],
    "text": ["a", "ü", ""],
    "tensors": [np.arange(6.0).reshape(2, 3), np.zeros((2, 3))],
    "tensors of bools": [np.array([True, False]), np.array([False, False])],
    "tensors of complex": [np.array([1j, 2]), np.array([3, 4j])],
    "empty tensors": [np.zeros((2, 0), np.float32), np.zeros((2, 0), np.float32)],
    "tensors of text": [["a", "b"], ["c", "d"]],
    "tensors of bytes": [[[b"a"], [b"b"]], [[b"c"], [b"d"]]],
    "empty tensors of text": [np.zeros((0, 2), object), np.zeros((0, 2), object)],
    "ragged": [np.arange(3), np.arange(0), np.arange(5)],
    "ragged ranks": [np.zeros((2, 2), np.float32), np.zeros(3, np.float32)],
    "ragged text": [["a"], ["b", "c"]],
    "ragged text, some empty": [np.array([], object), ["a"], np.array([], object)],
    "ragged bools": [np.array([True]), np.array([False, True])],
    "nests": [{"x": (1, "a"), "y": np.zeros(2)}, {"x": (2, "b"), "y": np.ones(2)}],
}


def test_a_block_survives_the_way_through_arrow() -> None:
    for name, rows in ROWS.items():
        block = block_of_rows(rows)
        batch = block_to_arrow(block)
        with pa.BufferOutputStream() as stream:
            with pa.ipc.new_stream(stream, batch.schema) as writer:
                writer.write_batch(batch)
            read = pa.ipc.open_stream(stream.getvalue()).read_next_batch()
        back = block_of_arrow(read, block.structure)
        assert same(back.rows(), block.rows()), name
        assert back.specs == block.specs, name


def test_numbers_and_tensors_are_not_copied() -> None:
    block = block_of_rows([(1, np.arange(4.0)), (2, np.ones(4))])
    back = block_of_arrow(block_to_arrow(block), block.structure)
    for mine, theirs in zip(block.columns, back.columns, strict=True):
        assert np.shares_memory(mine, theirs)
        assert not theirs.flags.writeable


def test_columns_are_named_and_tensors_have_arrows_own_type() -> None:
    batch = block_to_arrow(block_of_rows([{"image": np.zeros((2, 3), np.uint8), "label": (1, b"x")}]))
    assert batch.schema.names == ["image", "label.0", "label.1"]
    assert batch.schema.field("image").type == pa.fixed_shape_tensor(pa.uint8(), (2, 3))
    assert batch.schema.field("label.1").type == pa.large_binary()
    with pytest.raises(SpecError, match=r"one column per leaf.*got columns \['0', '1'\]"):
        block_of_arrow(block_to_arrow(block_of_rows([(1, 2)])), LEAF)


def test_arrow_batches_are_the_batches_of_a_dataset() -> None:
    dataset = Dataset.from_tensor_slices({"x": np.arange(5), "image": np.zeros((5, 2, 2), np.float32)}).batch(2)
    batches = list(dataset.arrow_batches())
    assert [batch.num_rows for batch in batches] == [2, 2, 1]
    assert batches[1].column("x").to_pylist() == [2, 3]
    assert batches[0].schema.field("image").type == pa.fixed_shape_tensor(pa.float32(), (2, 2))
    with pytest.raises(InvalidArgumentError, match="must share their first dimension"):
        next(Dataset.range(3).arrow_batches())


def test_columns_of_numbers_load_neither_pandas_nor_ml_dtypes() -> None:
    """Arrow's own conversions load pandas, which would delay the first batch of a process by a third of a second."""
    program = """
import sys
import numpy as np
import raydist as rd
from raydist.pipelines.elements.arrow import column_of_arrow, column_to_arrow
for column in (np.arange(3), np.zeros((2, 3), np.float32)):
    found = column_of_arrow(column_to_arrow(column).slice(1), column.dtype)
    assert found.tolist() == column[1:].tolist()
    assert np.shares_memory(found, column) and not found.flags.writeable
list(rd.Dataset.range(3).batch(2).as_numpy_iterator())
assert not {"pandas", "ml_dtypes"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=50)


MAKERS: dict[str, Callable[[int], Column]] = {
    "scalars": lambda n: np.arange(n, dtype=np.int64),
    "tensors": lambda n: np.arange(6.0 * n).reshape(n, 2, 3),
    "bytes": lambda n: object_column([b"%d" % k * k for k in range(n)]),
    "ragged": lambda n: object_column([np.arange(k % 3) for k in range(n)]),
}


def stored(column: Column, way: str = "kept") -> RemoteColumn:
    return RemoteColumn.of(KeptColumn(column) if way == "kept" else InStore.put(column))


@settings(max_examples=150)
@given(kind=st.sampled_from(sorted(MAKERS)), way=st.sampled_from(["kept", "in store"]), data=st.data())
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


def test_a_part_of_rows_is_sent_alone() -> None:
    nested = NestedColumn(stored(np.arange(4_000.0), "in store").batched(4, 1_000))
    sent = pickle.dumps(RemoteColumn.of(nested).element(2)[10:12])
    assert len(sent) < 2_000
    assert pickle.loads(sent).values().tolist() == [2010, 2011]
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
