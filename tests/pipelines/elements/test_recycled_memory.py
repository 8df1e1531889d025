from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.pipelines.elements import recycled_memory
from raydist.pipelines.elements.blocks import Block, concat_blocks
from raydist.pipelines.elements.recycled_memory import RecycledMemory
from raydist.pipelines.elements.rows import block_of_rows

LARGE = 1 << 18  # float64: 2 MiB


def parts(value: float, count: int = 2) -> list[np.ndarray]:
    return [np.full((1, LARGE // count), value + part) for part in range(count)]


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_comes_back_when_the_last_view_is_gone() -> None:
    memory = RecycledMemory()
    joined = memory.concatenate(parts(1.0))
    assert joined[:, -1].tolist() == [1.0, 2.0]
    assert joined.flags.writeable
    first, view = address(joined), joined[1:, ::2]
    del joined
    other = memory.concatenate(parts(5.0))
    assert address(other) != first
    assert view[0, 0] == 2.0
    del view
    assert address(memory.concatenate(parts(7.0))) == first
    assert other[1, 0] == 6.0


def test_a_tensor_keeps_its_memory() -> None:
    torch = pytest.importorskip("torch")
    memory = RecycledMemory()
    tensor = torch.from_numpy(memory.concatenate(parts(1.0)))[1]
    memory.concatenate(parts(9.0))
    gc.collect()
    memory.concatenate(parts(9.0))
    assert tensor[5] == 2.0


def test_small_arrays_and_objects_are_numpys_own() -> None:
    memory = RecycledMemory()
    small = memory.concatenate([np.arange(3), np.arange(2)])
    assert small.tolist() == [0, 1, 2, 0, 1]
    assert small.base is None


def test_copies_are_the_callers_own() -> None:
    memory = RecycledMemory()
    given = np.arange(2 * LARGE).reshape(2, LARGE)[:, ::-1]
    copied = memory.copy(given)
    copied[0, 0] = -1
    assert given[0, 0] == LARGE - 1
    assert copied[1].tolist() == given[1].tolist()
    first = address(copied)
    del copied
    assert address(memory.copy(given)) == first
    assert memory.copy(np.array(3.0)).shape == ()


@pytest.mark.parametrize("indices", [[3, 1, 1], [-1, 0, 2], [True, False, True, True]])
def test_rows_are_taken_as_numpy_takes_them(indices: list[int]) -> None:
    memory = RecycledMemory()
    column = np.arange(4 * LARGE).reshape(4, LARGE)
    chosen = np.array(indices)
    assert (memory.take(column, chosen) == column[chosen]).all()
    with pytest.raises(IndexError):
        memory.take(column, np.array([0, 4]))
    first = address(memory.take(column, np.array([0, 1])))
    assert address(memory.take(column, np.array([2, 3]))) == first


def test_what_is_too_large_to_lie_idle_is_freed() -> None:
    memory = RecycledMemory(most_idle_bytes=LARGE * 8)
    for count in (2, 4):
        memory.copy(np.zeros(LARGE * count // 2))
    assert [len(block) for block in memory._idle.values()] == [LARGE * 8]


def test_few_are_kept_and_none_after_their_owner() -> None:
    memory = RecycledMemory()
    held = [memory.concatenate(parts(float(k))) for k in range(6)]
    assert [array[0, 0] for array in held] == [0, 1, 2, 3, 4, 5]
    held.clear()
    assert len(memory._idle) == recycled_memory._MOST_IDLE
    last = memory.concatenate(parts(8.0))
    gone = weakref.ref(memory)
    del memory
    assert gone() is None
    assert last[1, 3] == 9.0


def test_memory_of_another_size_is_not_taken() -> None:
    memory = RecycledMemory()
    del_me = memory.concatenate(parts(1.0, 1) * 4)
    kept = address(del_me)
    del del_me
    assert address(memory.concatenate(parts(2.0, 1))) != kept, "a quarter of it: most would lie idle"


@given(st.lists(st.tuples(st.sampled_from(["join", "view", "drop"]), st.integers(0, 7)), max_size=30))
def test_what_anybody_sees_never_changes(steps: list[tuple[str, int]]) -> None:
    memory = RecycledMemory()
    seen: list[tuple[np.ndarray, float]] = []
    for number, (step, which) in enumerate(steps):
        if step == "join":
            seen.append((memory.concatenate([np.full((1 + which % 2, LARGE), float(number))]), float(number)))
        elif step == "view" and seen:
            array, value = seen[which % len(seen)]
            seen.append((array[:, which::1000], value))
        elif step == "drop" and seen:
            seen.pop(which % len(seen))
        array = np.empty(0)
        assert all((array[:, ::997] == value).all() for array, value in seen)


def test_blocks_are_joined_in_it() -> None:
    memory = RecycledMemory()
    blocks = [block_of_rows([np.full(LARGE // 2, float(k)), np.full(LARGE // 2, float(k))]) for k in range(2)]
    first = concat_blocks(blocks, memory)
    assert isinstance(first, Block)
    assert first.columns[0][:, 0].tolist() == [0, 0, 1, 1]
    at = address(first.columns[0])
    del first
    assert address(concat_blocks(blocks, memory).columns[0]) == at
    words = [block_of_rows(["a"]), block_of_rows(["b"])]
    assert concat_blocks(words, memory).rows() == ["a", "b"]
