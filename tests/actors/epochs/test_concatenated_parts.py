"""Parts of a column that are one array where they are read."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from raydist.actors.epochs.piece import pack_piece
from raydist.actors.packed_columns import ConcatenatedParts


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


@pytest.mark.parametrize("dtype", ["float32", "int64", "float16", "uint8"])
def test_parts_are_one_array_of_the_memory_that_they_were_written_to(dtype: str) -> None:
    given = parts(dtype=dtype, rows=128)
    assert ConcatenatedParts.suit(given)
    whole, memory = through_store(ConcatenatedParts(given))
    assert (whole.dtype, whole.shape) == (given[0].dtype, (384, 256))
    assert (whole == np.concatenate(given)).all()
    assert np.shares_memory(whole, memory)
    assert not whole.flags.writeable


@pytest.mark.parametrize(("cores", "most"), [(2, 1 << 20), (11, 1 << 20), (12, 8 << 20)])
def test_a_large_array_is_cut_where_there_are_few_cores(monkeypatch: pytest.MonkeyPatch, cores: int, most: int) -> None:
    """Ray starts threads for what has 1 MB or more."""
    monkeypatch.setattr("raydist.actors.packed_columns.num_cores", lambda: cores)
    given = [np.arange(700_001, dtype=np.float64).reshape(-1, 1)]
    assert ConcatenatedParts.suit(given) == (cores < 12)
    whole, memory = through_store(ConcatenatedParts(given))
    assert (whole == given[0]).all()
    assert np.shares_memory(whole, memory)
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(ConcatenatedParts(given), protocol=5, buffer_callback=buffers.append)
    assert max(buffer.raw().nbytes for buffer in buffers) < most


def test_parts_that_do_not_follow_each_other_are_joined() -> None:
    given = parts()
    whole, memory = through_store(ConcatenatedParts(given), alignment=1 << 17)
    assert (whole == np.concatenate(given)).all()
    assert not np.shares_memory(whole, memory)
    assert (pickle.loads(pickle.dumps(ConcatenatedParts(given), protocol=5)) == whole).all()


def test_only_large_parts_without_gaps_are_kept_apart() -> None:
    assert not ConcatenatedParts.suit(parts(1))
    assert not ConcatenatedParts.suit(parts(rows=2))
    assert not ConcatenatedParts.suit([np.zeros((9_001, 1), np.uint8)] * 8)
    assert not ConcatenatedParts.suit([part.T for part in parts()])
    assert not ConcatenatedParts.suit([part.astype(object) for part in parts()])


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
