from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.nest import LEAF
from raydist.dataset import Dataset
from raydist.pipelines.elements.arrow import block_of_arrow, block_to_arrow
from raydist.pipelines.elements.rows import block_of_rows
from tests.contracts.op import same

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


@pytest.mark.parametrize("name", ROWS)
def test_a_block_survives_the_way_through_arrow(name: str) -> None:
    block = block_of_rows(ROWS[name])
    batch = block_to_arrow(block)
    with pa.BufferOutputStream() as stream:
        with pa.ipc.new_stream(stream, batch.schema) as writer:
            writer.write_batch(batch)
        read = pa.ipc.open_stream(stream.getvalue()).read_next_batch()
    back = block_of_arrow(read, block.structure)
    assert same(back.rows(), block.rows())
    assert back.specs == block.specs


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


def test_the_structure_must_fit() -> None:
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


def test_the_iterator_of_arrow_batches_can_be_saved() -> None:
    iterator = Dataset.range(6).batch(2).arrow_batches()
    next(iterator)
    other = Dataset.range(6).batch(2).arrow_batches()
    other.load_state_dict(iterator.state_dict())
    assert [batch.column(0).to_pylist() for batch in other] == [[2, 3], [4, 5]]


def test_columns_of_numbers_load_no_pandas() -> None:
    """A third of a second before the first batch of a process: Arrow's own conversions load it."""
    program = """
import sys
import numpy as np
from raydist.pipelines.elements.arrow import column_of_arrow, column_to_arrow
for column in (np.arange(3), np.zeros((2, 3), np.float32)):
    found = column_of_arrow(column_to_arrow(column).slice(1), column.dtype)
    assert found.tolist() == column[1:].tolist()
    assert np.shares_memory(found, column) and not found.flags.writeable
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=50)
