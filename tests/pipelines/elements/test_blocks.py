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
from raydist.core.nest import LEAF
from raydist.dataset import Dataset
from raydist.pipelines.elements.arrow import block_of_arrow, block_to_arrow
from raydist.pipelines.elements.batch_rows import row_spec, rows_of_batch
from raydist.pipelines.elements.blocks import Block, concat_blocks, private_column
from raydist.pipelines.elements.columns import (
    Column,
    KeptColumn,
    NestedColumn,
    RemoteColumn,
    alike,
    as_remote,
    object_column,
)
from raydist.pipelines.elements.convert import numpy_rows, torch_rows
from raydist.pipelines.elements.items import ElementError, Item, count_items, join_items
from raydist.pipelines.elements.leaf_values import as_leaf
from raydist.pipelines.elements.rows import block_of_rows, items_of_rows
from raydist.pipelines.elements.spec import BYTES, STR, DatasetSpec, TensorSpec, as_dtype, most_specific_common
from tests.contracts.op import same
from tests.pipelines.storing_executor import InStore


class Color(enum.IntEnum):
    RED = 1


LEAVES: list[tuple[Any, str, tuple[int, ...]]] = [
    (1, "int64", ()),
    (1.5, "float32", ()),
    (True, "bool", ()),
    (1j, "complex128", ()),
    (Color.RED, "int64", ()),
    (np.float64(1), "float64", ()),
    (np.zeros(2, ">i4"), "int32", (2,)),
    ([1, 2.5], "float32", (2,)),
    ([[1.0], [2.0]], "float32", (2, 1)),
    ([np.float64(1), np.float64(2)], "float64", (2,)),
    ([np.zeros(2, np.uint8)] * 3, "uint8", (3, 2)),
    ([torch.ones(2)] * 2, "float32", (2, 2)),
    ([], "float32", (0,)),
    (torch.ones(2, 3, dtype=torch.float16, requires_grad=True), "float16", (2, 3)),
    (torch.tensor(1 + 1j).conj(), "complex64", ()),
    ([(1, 2), (3, 4)], "int64", (2, 2)),  # tuples in lists are part of the tensor
    ([([1.5, 2], (3, 4))], "float32", (1, 2, 2)),
    ([(np.float64(1), 2), (3, 4)], "float64", (2, 2)),
    ([("a", "b"), ("c", "d")], "object", (2, 2)),
    ([[b"a"], [b"b"]], "object", (2, 1)),
    (np.array([b"a", b"bc"], object), "object", (2,)),
    (np.array(["a", "bc"], object), "object", (2,)),
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


def test_most_specific_common() -> None:
    three, four = TensorSpec((3, 1), "u1"), TensorSpec((4, 1), "u1")
    assert most_specific_common(three, four) == TensorSpec((None, 1), "u1")
    assert most_specific_common(three, TensorSpec((), "u1")) == TensorSpec(None, "u1")
    assert most_specific_common(three, TensorSpec((3, 1), "i1")) is None
    short, long = (DatasetSpec(TensorSpec((size,), "int64")) for size in (2, 3))
    assert most_specific_common(short, long) == DatasetSpec(TensorSpec((None,), "int64"))
    assert most_specific_common(short, DatasetSpec(TensorSpec((2,), "str"))) is None
    pairs = [DatasetSpec((spec.element_spec, TensorSpec())) for spec in (short, long)]
    assert most_specific_common(*pairs) == DatasetSpec((TensorSpec((None,), "int64"), TensorSpec()))
    assert most_specific_common(pairs[0], short) is None


Point = namedtuple("Point", ["x", "y"])


def test_dense_and_ragged_columns() -> None:
    dense = block_of_rows([np.zeros((2, 3)), np.ones((2, 3))])
    assert dense.columns[0].shape == (2, 2, 3)
    ragged = block_of_rows([np.zeros((2, 3)), np.ones((2, 4))])
    assert ragged.columns[0].dtype == object
    assert ragged.specs == (TensorSpec((2, None), np.float64),)
    assert block_of_rows([np.zeros(2), np.zeros((2, 2))]).specs[0].shape is None
    assert block_of_rows([["a"], ["b", "c"]]).specs == (TensorSpec((None,), "U"),)
    items = items_of_rows([1, 2, "a", 3.5, None, 4.5, (1,)])  # neighbours of one kind share a block
    assert [item.num_rows if isinstance(item, Block) else item.index for item in items] == [2, 1, 1, 4, 1, 1]
    assert isinstance(items[3], ElementError)


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


def test_blocks_join_where_dtypes_agree() -> None:
    joined = concat_blocks([BLOCK, BLOCK.slice(0, 1)])
    assert joined.rows() == [(1, "a"), (2, "b"), (3, "c"), (1, "a")]
    ragged = concat_blocks([block_of_rows([np.zeros(2), np.ones(2)]), block_of_rows([np.zeros(3)])])
    assert ragged.specs == (TensorSpec((None,), np.float64),)
    assert [len(row) for row in ragged.rows()] == [2, 2, 3]


def test_the_signature_of_a_wide_block_is_short_and_its_own() -> None:
    wide = [block_of_rows([{f"column {i}": i for i in range(1000)} | {"last": last}]) for last in (1, 0.5)]
    assert [len(block.signature) < 500 for block in wide] == [True, True]
    assert wide[0].signature != wide[1].signature
    assert "... (1001 leaves, " in wide[0].signature


ERROR = ElementError(ValueError("bad"))


def test_small_neighbours_of_one_kind_are_joined() -> None:
    large = block_of_rows([np.zeros(1 << 14)])
    numbers: list[Item] = [block_of_rows([1, 2, 3]), ERROR, block_of_rows([4, 5]), block_of_rows([6])]
    parts = join_items([*numbers, block_of_rows(["text"]), block_of_rows(["text"]), large, large])
    assert [count_items([item]) for item in parts] == [3, 1, 3, 2, 1, 1]
    assert [part.rows() for part in parts[:4] if isinstance(part, Block)] == [[1, 2, 3], [4, 5, 6], ["text"] * 2]


def test_a_row_loses_the_first_dimension() -> None:
    assert row_spec(TensorSpec((None, 2), "int64")) == TensorSpec((2,), "int64")
    with pytest.raises(InvalidArgumentError, match="first dimension to split"):
        row_spec(TensorSpec((), "int64"))
    with pytest.raises(InvalidArgumentError, match="must share their first dimension, got shapes"):
        rows_of_batch(block_of_rows([(np.arange(3), np.arange(4))]))


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
