"""Elements as blocks, as Arrow record batches, and as columns of row ids."""

from __future__ import annotations

import enum
import pickle
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.dataset import Dataset
from raydist.pipelines.elements.arrow import block_of_arrow, block_to_arrow
from raydist.pipelines.elements.blocks import Block, concat_blocks, private_column
from raydist.pipelines.elements.columns import (
    Column,
    KeptColumn,
    NestedColumn,
    RemoteColumn,
    as_remote,
    object_column,
)
from raydist.pipelines.elements.convert import numpy_rows, torch_rows
from raydist.pipelines.elements.leaf_values import as_leaf
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.elements.spec import BYTES, STR, TensorSpec, as_dtype
from tests.contracts.op import same
from tests.pipelines.storing_executor import InStore


class Color(enum.IntEnum):
    RED = 1


LEAVES: list[tuple[Any, str, tuple[int, ...]]] = [
    (1, "int64", ()),
    (1.5, "float32", ()),
    (1j, "complex128", ()),
    (Color.RED, "int64", ()),
    (np.zeros(2, ">i4"), "int32", (2,)),
    ([1, 2.5], "float32", (2,)),
    ([np.float64(1), np.float64(2)], "float64", (2,)),
    ([np.zeros(2, np.uint8)] * 3, "uint8", (3, 2)),
    ([], "float32", (0,)),
    (torch.ones(2, 3, dtype=torch.float16, requires_grad=True), "float16", (2, 3)),
    (torch.tensor(1 + 1j).conj(), "complex64", ()),
    ([(1, 2), (3, 4)], "int64", (2, 2)),  # tuples in lists are part of the tensor
    ([([1.5, 2], (3, 4))], "float32", (1, 2, 2)),
    ([(np.float64(1), 2), (3, 4)], "float64", (2, 2)),
    ([("a", "b"), ("c", "d")], "object", (2, 2)),
    ([[b"a"], [b"b"]], "object", (2, 1)),
    (np.array([b"a", b"bc"], object), "object", (2,)),
]


def test_leaves() -> None:
    for value, dtype, shape in LEAVES:
        leaf = as_leaf(value)
        assert (leaf.dtype.name, leaf.shape) == (dtype, shape), value
    assert as_leaf([(1, 2), (3, 4)]).tolist() == [[1, 2], [3, 4]]
    assert as_leaf(np.bytes_(b"a")) == b"a"
    assert type(as_leaf(np.str_("a"))) is str
    assert as_leaf(np.array(["a", "bc"])).tolist() == ["a", "bc"]


def test_what_is_no_leaf_says_why() -> None:
    cases: list[tuple[Any, str]] = [
        (None, "got None of type builtins.NoneType"),
        ([[1], [1, 2]], "must be rectangular"),
        ([(1, 2), (3,)], "must be rectangular"),
        (["a", 1], "must hold one type"),
        (np.array([1, "a"], object), "object array of int, str"),
        (np.zeros(1, "V3"), "got dtype"),
    ]
    for value, message in cases:
        with pytest.raises(SpecError, match=message):
            as_leaf(value)


def test_a_dtype_is_given_in_any_words() -> None:
    for dtype in ("int32", np.int32, np.dtype("int32"), torch.int32):
        assert TensorSpec((2,), dtype) == TensorSpec([2], np.int32)
    assert (as_dtype("S7"), as_dtype(str)) == (BYTES, STR)
    with pytest.raises(InvalidArgumentError, match="made on the device"):
        as_dtype(torch.quint8)
    with pytest.raises(SpecError, match="Python objects"):
        as_dtype(object)


Point = namedtuple("Point", ["x", "y"])


def test_rows_and_blocks_that_must_agree_show_both() -> None:
    different: list[list[Any]] = [[1, "a"], [(1, 2), (1, 2, 3)], [{"a": 1}, {"b": 1}], [Point(1, 2), (1, 2)]]
    for rows in different:
        with pytest.raises(SpecError, match="All elements must have one"):
            block_of_rows(rows)
    with pytest.raises(SpecError, match=r"one structure, got \('\*', '\*'\) and then \*"):
        concat_blocks([BLOCK, block_of_rows([1])])
    with pytest.raises(SpecError, match=r"one dtype of '0', got .*int64\) and then .*float32\)"):
        concat_blocks([BLOCK, block_of_rows([(1.0, "a")])])


BLOCK = block_of_rows([(1, "a"), (2, "b"), (3, "c")])


def test_slices_are_views_takes_are_copies_and_shared_columns_read_only() -> None:
    assert BLOCK.slice(1, 9).rows() == [(2, "b"), (3, "c")]
    assert np.shares_memory(BLOCK.slice(0, 2).columns[0], BLOCK.columns[0])
    assert BLOCK.take(np.array([2, 0])).rows() == [(3, "c"), (1, "a")]
    assert BLOCK.slice(2, 1).num_rows == 0
    shared = BLOCK.shared().columns[0]
    assert not shared.flags.writeable
    assert BLOCK.columns[0].flags.writeable
    assert private_column(BLOCK.columns[0]) is BLOCK.columns[0]
    assert private_column(shared).flags.writeable
    row = np.zeros(2)
    row.flags.writeable = False
    assert private_column(object_column([row, np.zeros(3)]))[0].flags.writeable
    block = block_of_rows([np.zeros(2), np.zeros(2)])
    for rows in (numpy_rows(block.shared()), torch_rows(block.shared(), torch.from_numpy)):
        rows[0][:] = 1
    assert not block.columns[0].any()


def test_a_tensor_pickles_its_own_bytes_alone() -> None:
    rows = torch_rows(block_of_rows([np.zeros(10)] * 1000), torch.from_numpy)
    assert len(pickle.dumps(rows[3])) < 2000


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
