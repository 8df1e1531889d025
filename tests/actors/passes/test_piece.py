"""Pieces of batches: what they hand out, and that their bytes leave a pickle as they are."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from raydist.actors.passes.piece import BatchPiece, PackedText, pack_piece, store_step
from raydist.nest import LEAF
from raydist.pipelines.run.split import cut_batch


def objects(*values: Any) -> np.ndarray[Any, Any]:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def through_buffers(piece: BatchPiece) -> tuple[BatchPiece, list[pickle.PickleBuffer]]:
    """As the object store does it: buffers out of band, read-only where they arrive."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(piece, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[buffer.raw().toreadonly() for buffer in buffers]), buffers


def test_numbers_travel_as_buffers_and_arrive_private() -> None:
    column = np.arange(6, dtype=np.float32).reshape(3, 2)
    piece, buffers = through_buffers(pack_piece((column,), 3, zero_copy=False))
    assert [buffer.raw().nbytes for buffer in buffers] == [column.nbytes]
    leaf = piece.leaf(0)
    leaf += 1
    assert leaf.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert not piece.array(0).flags.writeable
    assert np.shares_memory(piece.array(0), column)


def test_zero_copy_hands_out_the_mapping() -> None:
    column = np.arange(6, dtype=np.int16)
    piece, _ = through_buffers(pack_piece((column,), 6, zero_copy=True))
    assert piece.leaf(0).data_ptr() == column.ctypes.data


def test_a_slice_travels_alone() -> None:
    column = np.arange(1000)
    _, buffers = through_buffers(pack_piece((column[10:20],), 10, zero_copy=False))
    assert sum(buffer.raw().nbytes for buffer in buffers) == 80


@pytest.mark.parametrize(
    "column",
    [objects(b"a\0", b"", b"long" * 100), objects("é", "x"), objects(), objects(b"a", b"b", b"c", b"d").reshape(2, 2)],
)
def test_text_travels_as_arrow_and_comes_back(column: np.ndarray[Any, Any]) -> None:
    packed = pack_piece((column,), len(column), zero_copy=False)
    assert isinstance(packed.columns[0], PackedText)
    found = through_buffers(packed)[0].leaf(0)
    assert found.dtype == object
    assert found.shape == column.shape
    assert found.tolist() == column.tolist()


def test_text_that_is_no_unicode_travels_too() -> None:
    column = objects("a\udcff")
    assert through_buffers(pack_piece((column,), 1, zero_copy=False))[0].leaf(0).tolist() == ["a\udcff"]


def test_scalars_are_handed_out_as_themselves() -> None:
    name = np.empty((), dtype=object)
    name[()] = b"x\0"
    piece = through_buffers(pack_piece((np.array(3), name), 1, zero_copy=False))[0]
    assert piece.leaf(0).shape == ()
    assert piece.leaf(0).item() == 3
    assert piece.leaf(1) == b"x\0"


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float64", "complex64", "uint16"])
def test_dtypes_are_kept(dtype: str) -> None:
    piece = pack_piece((np.zeros((0, 2), dtype),), 0, zero_copy=False)
    assert str(piece.leaf(0).dtype).removeprefix("torch.") == dtype
    assert tuple(piece.leaf(0).shape) == (0, 2)


def test_a_step_puts_each_piece_once() -> None:
    stored: list[BatchPiece] = []

    def put(piece: BatchPiece) -> Any:
        stored.append(piece)
        return len(stored) - 1

    rows = np.arange(2).repeat(10_000).reshape(2, 10_000)
    cuts = cut_batch([rows], num_replicas=3, rule="per_batch", step=0)
    batch = store_step(cuts, step=5, structure=LEAF, put=put)
    assert batch.refs[:2] == (0, 1)
    assert batch.refs[2].leaf(0).shape == (0, 10_000)
    assert batch.stand_ins == (None, None, 2)
    assert batch.rows == (1, 1, 0)
    assert [piece.leaf(0)[:, 0].tolist() for piece in stored] == [[0], [1], [0, 1]]
    assert batch.only(1).refs == (None, 1, None)


def test_small_pieces_travel_with_their_step() -> None:
    names = objects(*[b"x" * 1000] * 40)
    small, large = (cut_batch([names[:n]], num_replicas=1, rule="per_batch", step=0) for n in (4, 40))
    assert isinstance(store_step(small, step=0, structure=LEAF, put=len).refs[0], BatchPiece)
    assert store_step(large, step=0, structure=LEAF, put=lambda piece: "stored").refs == ("stored",)
