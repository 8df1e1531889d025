from __future__ import annotations

import numpy as np
import pytest

from raydist.core.errors import SpecError
from raydist.pipelines.elements.blocks import concat_blocks, object_column, private_column
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.elements.spec import TensorSpec

BLOCK = block_of_rows([(1, "a"), (2, "b"), (3, "c")])


def test_slices_are_views_and_takes_are_copies() -> None:
    assert BLOCK.slice(1, 9).rows() == [(2, "b"), (3, "c")]
    assert np.shares_memory(BLOCK.slice(0, 2).columns[0], BLOCK.columns[0])
    assert BLOCK.take(np.array([2, 0])).rows() == [(3, "c"), (1, "a")]
    assert BLOCK.slice(2, 1).num_rows == 0


def test_signature_is_structure_and_dtypes() -> None:
    assert BLOCK.signature == "('*', '*') of int64, str"


def test_shared_columns_are_read_only_and_private_ones_are_not() -> None:
    shared = BLOCK.shared().columns[0]
    assert not shared.flags.writeable
    assert BLOCK.columns[0].flags.writeable
    assert private_column(BLOCK.columns[0]) is BLOCK.columns[0]
    assert private_column(shared).flags.writeable
    row = np.zeros(2)
    row.flags.writeable = False
    assert private_column(object_column([row, np.zeros(3)]))[0].flags.writeable


def test_blocks_join_where_dtypes_agree() -> None:
    joined = concat_blocks([BLOCK, BLOCK.slice(0, 1)])
    assert joined.rows() == [(1, "a"), (2, "b"), (3, "c"), (1, "a")]
    ragged = concat_blocks([block_of_rows([np.zeros(2), np.ones(2)]), block_of_rows([np.zeros(3)])])
    assert ragged.specs == (TensorSpec((None,), np.float64),)
    assert [len(row) for row in ragged.rows()] == [2, 2, 3]


def test_blocks_of_another_kind_show_both() -> None:
    with pytest.raises(SpecError, match=r"one structure, got \('\*', '\*'\) and then \*"):
        concat_blocks([BLOCK, block_of_rows([1])])
    with pytest.raises(SpecError, match=r"one dtype of '0', got .*int64\) and then .*float32\)"):
        concat_blocks([BLOCK, block_of_rows([(1.0, "a")])])


def test_bytes_are_counted() -> None:
    assert block_of_rows([np.zeros((10, 10))] * 3).num_bytes == 2400
    assert block_of_rows([b"abcd", b"e"]).num_bytes == 24


def test_the_signature_of_a_wide_block_is_short_and_its_own() -> None:
    wide = [block_of_rows([{f"column {i}": i for i in range(1000)} | {"last": last}]) for last in (1, 0.5)]
    assert [len(block.signature) < 500 for block in wide] == [True, True]
    assert wide[0].signature != wide[1].signature
    assert "... (1001 leaves, " in wide[0].signature
