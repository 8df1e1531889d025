"""Elements as blocks: their leaves, specs and structure."""

from __future__ import annotations

import enum
import pickle
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.pipelines.elements.batch_rows import row_spec, rows_of_batch
from raydist.pipelines.elements.blocks import Block, concat_blocks, object_column, private_column
from raydist.pipelines.elements.convert import numpy_rows, torch_rows
from raydist.pipelines.elements.items import ElementError, count_items, join_items
from raydist.pipelines.elements.leaf_values import as_leaf
from raydist.pipelines.elements.rows import block_of_rows, items_of_rows
from raydist.pipelines.elements.spec import (
    BYTES,
    STR,
    DatasetSpec,
    TensorSpec,
    as_dtype,
    most_specific_common,
)


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


def test_neighbours_of_one_kind_share_a_block() -> None:
    items = items_of_rows([1, 2, "a", 3.5, None, 4.5, (1,)])
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
    numbers = [block_of_rows([1, 2, 3]), ERROR, block_of_rows([4, 5]), block_of_rows([6])]
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
