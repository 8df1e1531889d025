"""Results of functions become blocks without needless copies, and nobody sees the memory change."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raydist.dataset import Dataset
from raydist.pipelines.elements.function_results import ReusedResults, large_blocks
from raydist.pipelines.elements.functions import RowCalls
from raydist.pipelines.elements.recycled_memory import RecycledMemory
from raydist.pipelines.elements.rows import block_of_rows
from tests.contracts.op import collect, iterate

SIZE = 1 << 18


def big(value: float = 1.0) -> Any:
    return np.full(SIZE, value, np.float32)


MAKERS: list[Callable[[], Any]] = [
    lambda: big(),
    lambda: (big(), np.zeros((2, 2), np.int64)),
    lambda: {"b": big(), "a": big(2)},
]


def addresses(value: Any) -> set[int]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
    return {part.ctypes.data for part in parts}


def test_what_nobody_holds_is_taken_over_and_what_somebody_holds_is_copied() -> None:
    for make in MAKERS:
        values = [make(), make()]
        wanted = [block_of_rows([value]) for value in values]
        memory = [addresses(value) for value in values]
        blocks = large_blocks(values)
        assert blocks is not None
        assert [{column.ctypes.data for column in block.columns} for block in blocks] == memory
        assert [(block.structure, block.specs) for block in blocks] == [(one.structure, one.specs) for one in wanted]
        assert all((block.columns[0] == one.columns[0]).all() for block, one in zip(blocks, wanted, strict=True))
        kept = make()
        blocks = large_blocks([kept])
        assert blocks is not None
        assert not {column.ctypes.data for column in blocks[0].columns} & addresses(kept)
    kept, free = big(), big(2)
    address = free.ctypes.data
    values = [(kept, free)]
    del free
    blocks = large_blocks(values)
    assert blocks is not None
    assert blocks[0].columns[0].ctypes.data != kept.ctypes.data
    assert blocks[0].columns[1].ctypes.data == address


def test_elements_are_private_whatever_the_function_keeps() -> None:
    constant = big(5)
    seen: list[Any] = []

    def keep(x: Any) -> Any:
        result = x + constant
        if len(seen) < 3:
            seen.append(result)
        return {"kept": result, "constant": constant, "input": x}

    dataset = Dataset.range(8).map(lambda x: np.full(SIZE, x, np.float32)).map(keep)
    for number, element in enumerate(collect(iterate(dataset))):
        assert {name: leaf[0] for name, leaf in element.items()} == {"kept": number + 5, "constant": 5, "input": number}
        for leaf in element.values():
            leaf[:] = -1
    assert constant[0] == 5
    assert [float(result[0]) for result in seen] == [5, 6, 7]


@dataclass
class Pair:
    x: Any
    y: Any


def returning(held: Any, write: Callable[[Any, int], Any], wrap: Callable[[Any, int], Any] | None = None) -> Any:
    """A function that returns the same memory every time."""

    def fn(i: int) -> Any:
        write(held, int(i))
        return held if wrap is None else wrap(held, i)

    return fn


def roll(held: list[int], i: int) -> None:
    """The results count the calls, so a second call for one element would show."""
    held[:] = held[1], held[1] + 1


REUSED: dict[str, Callable[[], Callable[[int], Any]]] = {
    "array": lambda: returning(np.zeros(3), np.ndarray.fill),
    "large": lambda: returning(np.zeros(1 << 17), np.ndarray.fill, lambda held, i: (held, i)),
    "view": lambda: returning(np.zeros((2, 1 << 17)), np.ndarray.fill, lambda held, i: held[0]),
    "tensor": lambda: returning(torch.zeros(2), torch.Tensor.fill_),
    "view of a tensor": lambda: returning(torch.zeros(2, 1 << 17), torch.Tensor.fill_, lambda held, i: held[0]),
    "dictionary": lambda: returning({}, lambda held, i: held.update(x=i)),
    "calls": lambda: returning([0, 0], roll),
    "dataclass": lambda: returning(np.zeros(1), np.ndarray.fill, lambda held, i: Pair(i, held)),
}


def test_elements_are_what_was_returned() -> None:
    for name, make in REUSED.items():
        for num_rows in (1, 2, 20):
            fn = make()
            expected = [block_of_rows([copy.deepcopy(fn(i))]).row(0) for i in range(num_rows)]
            made = list(Dataset.range(num_rows).map(make(), num_parallel_calls=1).as_numpy_iterator())
            np.testing.assert_equal(made, expected, err_msg=f"{name} {num_rows}")


def test_what_was_found_to_be_reused_is_copied_from_then_on() -> None:
    reused, fn, found = ReusedResults(), returning(np.zeros(1), np.ndarray.fill), list[float]()
    for at in (0, 4):
        calls = RowCalls(fn, block_of_rows([at, at + 1, at + 2, at + 3]), at)
        results, _ = reused.begin(calls, 4)
        found += [float(each[0]) for each in results + calls.take(4 - len(results))[0]]
    assert found == list(range(8))


LARGE = 1 << 18  # float64: 2 MiB
MOST = 1 << 30


def rows(value: float, count: int = 2) -> np.ndarray:
    return np.full((count, LARGE // 2), value)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_comes_back_when_the_last_view_is_gone() -> None:
    memory = RecycledMemory(MOST)
    copied = memory.copy(rows(1.0)[:, ::-1])
    assert (copied == 1.0).all()
    assert copied.flags.writeable
    first, view = address(copied), torch.from_numpy(copied)[1:, ::2]
    del copied
    other = memory.copy(rows(5.0))
    gc.collect()
    assert address(other) != first
    assert view[0, 0] == 1.0
    del view
    assert address(memory.copy(rows(7.0))) == first
    assert other[1, 0] == 5.0


def test_rows_are_taken_as_numpy_takes_them() -> None:
    memory = RecycledMemory(MOST)
    column = np.arange(4 * LARGE).reshape(4, LARGE)
    for indices in ([3, 1, 1], [-1, 0, 2], [True, False, True, True]):
        chosen = np.array(indices)
        assert (memory.take(column, chosen) == column[chosen]).all()
    with pytest.raises(IndexError):
        memory.take(column, np.array([0, 4]))
    memory = RecycledMemory(MOST)
    first = address(memory.take(column, np.array([0, 1])))
    assert address(memory.take(column, np.array([2, 3]))) == first


@given(st.lists(st.tuples(st.sampled_from(["copy", "view", "drop"]), st.integers(0, 7)), max_size=30))
def test_what_anybody_sees_never_changes(steps: list[tuple[str, int]]) -> None:
    memory = RecycledMemory(MOST)
    seen: list[tuple[np.ndarray, float]] = []
    for number, (step, which) in enumerate(steps):
        if step == "copy":
            seen.append((memory.copy(rows(float(number), 2 + 2 * (which % 2))), float(number)))
        elif step == "view" and seen:
            array, value = seen[which % len(seen)]
            seen.append((array[:, which::1000], value))
        elif step == "drop" and seen:
            seen.pop(which % len(seen))
        array = np.empty(0)
        assert all((array[:, ::997] == value).all() for array, value in seen)
