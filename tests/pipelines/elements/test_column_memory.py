from __future__ import annotations

import threading
from typing import Any

import numpy as np

from raydist.pipelines.elements.blocks import Column
from raydist.pipelines.elements.column_memory import columns_made_by, new_column

FLOAT = np.dtype(np.float32)


class Room:
    """Gives out its memory once."""

    def __init__(self) -> None:
        self.memory = np.zeros(64, np.uint8)
        self.asked = 0

    def make(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Column | None:
        self.asked += 1
        return np.ndarray(shape, dtype, self.memory.data) if self.asked == 1 else None

    def holds(self, column: Column) -> bool:
        return np.shares_memory(column, self.memory)


def test_a_column_is_made_where_it_is_asked_for_while_there_is_room() -> None:
    room = Room()
    with columns_made_by(room.make):
        first, second = new_column((2, 3), FLOAT), new_column((2, 3), FLOAT)
    assert room.holds(first)
    assert not room.holds(second)
    assert (second.shape, second.dtype) == ((2, 3), FLOAT)
    assert not room.holds(new_column((2,), FLOAT))
    assert room.asked == 2


def test_none_within_another_is_numpys_memory() -> None:
    room = Room()
    with columns_made_by(room.make):
        with columns_made_by(None):
            assert not room.holds(new_column((2,), FLOAT))
        assert room.holds(new_column((2,), FLOAT))


def test_other_threads_make_theirs_elsewhere() -> None:
    room = Room()
    made: list[Column] = []
    with columns_made_by(room.make):
        thread = threading.Thread(target=lambda: made.append(new_column((2,), FLOAT)))
        thread.start()
        thread.join(10)
    assert len(made) == 1
    assert room.asked == 0
