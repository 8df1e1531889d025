"""Pieces of batches: their leaves, their pickles with out-of-band buffers, and their Arrow record batches."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from raydist.actors.epochs.piece import GroupPiece, pack_piece
from raydist.actors.packed_columns import ConcatenatedParts


def objects(*values: Any) -> np.ndarray[Any, Any]:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def one(*columns: np.ndarray[Any, Any], zero_copy: bool = False) -> GroupPiece:
    """The piece of a single step."""
    return pack_piece([columns], [str(index) for index in range(len(columns))], zero_copy=zero_copy)


def through_buffers(piece: GroupPiece) -> tuple[GroupPiece, list[pickle.PickleBuffer]]:
    """As the object store does it: buffers out of band, read-only where they arrive."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(piece, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[buffer.raw().toreadonly() for buffer in buffers]), buffers


def test_numbers_travel_as_buffers_and_arrive_private_unless_nothing_is_to_be_copied() -> None:
    column = np.arange(60, dtype=np.float32).reshape(30, 2)[10:13]
    piece, buffers = through_buffers(one(column))
    assert [buffer.raw().nbytes for buffer in buffers] == [column.nbytes], "a slice travels alone"
    leaf = piece.leaf(0)
    leaf += 1
    assert leaf.tolist() == (column + 1).tolist()
    assert not piece.array(0).flags.writeable
    assert np.shares_memory(piece.array(0), column)
    mapped, _ = through_buffers(one(column, zero_copy=True))
    assert mapped.leaf(0).data_ptr() == column.ctypes.data


def test_text_travels_as_arrow_and_other_objects_travel_too() -> None:
    for column in (
        objects(b"a\0", b"", b"long" * 100),
        objects("é", "x"),
        objects(),
        objects(b"a", b"b", b"c", b"d").reshape(2, 2),
    ):
        packed = one(column)
        kind = packed.batch.column(0).type
        while pa.types.is_fixed_size_list(kind):
            kind = kind.value_type
        assert pa.types.is_large_binary(kind) or pa.types.is_large_string(kind)
        found = through_buffers(packed)[0].leaf(0)
        assert (found.dtype, found.shape, found.tolist()) == (object, column.shape, column.tolist())
    for rows in (objects("a\udcff"), objects(1, b"x", None), objects({"a": 1})):
        assert through_buffers(one(rows))[0].leaf(0).tolist() == rows.tolist()
    ragged = objects(np.zeros((1, 2)), np.ones((3,)))
    assert [row.tolist() for row in through_buffers(one(ragged))[0].leaf(0)] == [[[0.0, 0.0]], [1.0, 1.0, 1.0]]


def test_scalars_are_handed_out_as_themselves() -> None:
    name = np.empty((), dtype=object)
    name[()] = b"x\0"
    piece = through_buffers(one(np.array(3), name))[0]
    assert piece.leaf(0).shape == ()
    assert piece.leaf(0).item() == 3
    assert piece.leaf(1) == b"x\0"


@st.composite
def groups(draw: Any) -> tuple[list[tuple[Any, ...]], dict[int, tuple[Any, ...]]]:
    """Regular pieces of one kind, with and without rows, and stand-ins for some of those without."""
    dtype = draw(st.sampled_from(["float32", "int8", "uint16", "float16", "complex64", "bool", "object"]))
    inner = draw(st.sampled_from([(), (2,), (1, 3)]))
    counter = iter(range(10_000))

    def piece(rows: int) -> tuple[Any, ...]:
        numbers = np.array([next(counter) for _ in range(rows)], np.int64)
        wide = np.broadcast_to(numbers.reshape(rows, *[1] * len(inner)), (rows, *inner))
        if dtype == "object":
            return (np.array([str(value) for value in wide.flat] or [], object).reshape(wide.shape), numbers)
        return wide.astype(dtype), numbers

    sizes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    padded = [place for place, rows in enumerate(sizes) if rows == 0 and draw(st.booleans())]
    return [piece(rows) for rows in sizes], {place: piece(2) for place in padded}


@given(groups())
def test_steps_of_a_group_come_back_each_at_its_place(group: Any) -> None:
    pieces, paddings = group
    packed = through_buffers(pack_piece(pieces, ["x", "y"], paddings=paddings))[0]
    for place, piece in enumerate(pieces):
        padding_of = paddings.get(place, piece)
        for index, column in enumerate(piece):
            found = packed.array(index, place)
            assert (found.dtype, found.shape) == (column.dtype, column.shape)
            assert found.tolist() == column.tolist()
            assert packed.array(index, len(pieces) + place).tolist() == padding_of[index].tolist()


def test_the_stand_in_of_a_piece_of_scalars_has_its_own_shape() -> None:
    nothing, padding = (np.zeros((0,)),), (np.array(5.0),)
    packed = through_buffers(pack_piece([nothing], ["x"], paddings={0: padding}))[0]
    assert packed.leaf(0).tolist() == []
    assert packed.leaf(0, 1).item() == 5.0


def test_any_arrow_reader_finds_rows_and_tensors() -> None:
    pieces = [(np.full((2, 3, 4), step, np.float32), objects(b"a", b"b")) for step in range(3)]
    batch = through_buffers(pack_piece(pieces, ["image", "name"]))[0].batch
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    table = pa.ipc.open_stream(sink.getvalue()).read_all()
    assert table.schema.names == ["image", "name"]
    assert isinstance(table.schema.field("image").type, pa.FixedShapeTensorType)
    assert table["image"].type.shape == [3, 4]
    assert table["image"].combine_chunks().to_numpy_ndarray()[:, 0, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert table["name"].to_pylist() == [b"a", b"b"] * 3


# --- parts of a column that are read as one array ---------------------------------------------------------------------


def through_store(value: Any, alignment: int = 64) -> tuple[Any, np.ndarray[Any, Any]]:
    """As Ray stores it: buffers one after the other in one memory, each at a multiple of `alignment`."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    sizes = [-(-buffer.raw().nbytes // alignment) * alignment for buffer in buffers]
    memory = np.zeros(sum(sizes), np.uint8)
    views, at = [], 0
    for buffer, size in zip(buffers, sizes, strict=True):
        raw = buffer.raw()
        memory[at : at + raw.nbytes] = np.frombuffer(raw, np.uint8)
        views.append(memory[at : at + raw.nbytes].data.toreadonly())
        at += size
    return pickle.loads(data, buffers=views), memory


def parts(count: int = 3, dtype: str = "float32", rows: int = 64) -> list[np.ndarray[Any, Any]]:
    return [np.full((rows, 256), step).astype(dtype) for step in range(count)]


def test_parts_are_one_array_of_the_memory_that_they_were_written_to() -> None:
    for dtype in ("float32", "int64", "uint8"):
        given = parts(dtype=dtype, rows=128)
        assert ConcatenatedParts.saves_time(given)
        whole, memory = through_store(ConcatenatedParts(given))
        assert (whole.dtype, whole.shape) == (given[0].dtype, (384, 256))
        assert (whole == np.concatenate(given)).all()
        assert np.shares_memory(whole, memory)
        assert not whole.flags.writeable
    apart, memory = through_store(ConcatenatedParts(given), alignment=1 << 17)
    assert (apart == np.concatenate(given)).all()
    assert not np.shares_memory(apart, memory), "they do not follow each other"
    assert (pickle.loads(pickle.dumps(ConcatenatedParts(given), protocol=5)) == whole).all()


def test_a_group_of_large_steps_is_written_once_and_read_where_it_lies() -> None:
    steps = [(images, np.arange(64) + 100 * step) for step, images in enumerate(parts())]
    packed = pack_piece(steps, ["image", "label"], zero_copy=True)
    assert packed.num_bytes == 3 * (64 * 256 * 4 + 64 * 8)
    assert packed.batch.num_rows == 192
    arrived, memory = through_store(packed)
    assert arrived.batch.equals(packed.batch)
    for step in range(3):
        assert np.shares_memory(arrived.array(0, step), memory)
        assert (arrived.array(0, step) == step).all()
        assert arrived.array(1, step).tolist() == (np.arange(64) + 100 * step).tolist()
