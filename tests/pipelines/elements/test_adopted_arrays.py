from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raydist.dataset import Dataset
from raydist.pipelines.elements.block_parts import large_blocks
from raydist.pipelines.elements.rows import block_of_rows
from tests.contracts.op import collect, iterate

SIZE = 1 << 14


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


@pytest.mark.parametrize("make", MAKERS)
def test_what_nobody_holds_is_taken_over(make: Callable[[], Any]) -> None:
    values = [make(), make()]
    wanted = [block_of_rows([value]) for value in values]
    memory = [addresses(value) for value in values]
    blocks = large_blocks(values)
    assert blocks is not None
    assert [{column.ctypes.data for column in block.columns} for block in blocks] == memory
    assert [(block.structure, block.specs) for block in blocks] == [(one.structure, one.specs) for one in wanted]
    assert all((block.columns[0] == one.columns[0]).all() for block, one in zip(blocks, wanted, strict=True))


@pytest.mark.parametrize("make", MAKERS)
def test_what_somebody_holds_is_copied(make: Callable[[], Any]) -> None:
    kept = make()
    blocks = large_blocks([kept])
    assert blocks is not None
    assert not {column.ctypes.data for column in blocks[0].columns} & addresses(kept)


def test_one_held_part_is_copied_alone() -> None:
    kept = big()
    free = big(2)
    address = free.ctypes.data
    values = [(kept, free)]
    del free
    blocks = large_blocks(values)
    assert blocks is not None
    assert blocks[0].columns[0].ctypes.data != kept.ctypes.data
    assert blocks[0].columns[1].ctypes.data == address


def test_views_are_copied() -> None:
    whole = np.zeros((2, SIZE), np.float32)
    blocks = large_blocks([whole[0]])
    assert blocks is not None
    assert not np.shares_memory(blocks[0].columns[0], whole)


@pytest.mark.parametrize(
    "value", [np.zeros(3), (big(), "text"), (big(), (big(),)), [1.0] * SIZE, 3, (), np.full(SIZE, "x" * 4, object)]
)
def test_all_else_is_left_alone(value: Any) -> None:
    values = [value]
    assert large_blocks(values) is None
    assert values == [value] or len(values) == 1


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
