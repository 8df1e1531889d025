from __future__ import annotations

import numpy as np
import pytest

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, Item, count_items, drop_items, join_items, keep_items
from raydist.pipelines.elements.rows import block_of_rows

ERROR = ElementError(ValueError("bad"))


def items() -> list[Item]:
    return [block_of_rows([1, 2, 3]), ERROR, block_of_rows([4, 5])]


def plain(parts: list[Item]) -> list[object]:
    return [x for part in parts for x in (part.rows() if isinstance(part, Block) else ["error"])]


@pytest.mark.parametrize("count", range(8))
def test_keeping_and_dropping_are_complements(count: int) -> None:
    whole = [1, 2, 3, "error", 4, 5]
    assert plain(keep_items(items(), count)) == whole[:count]
    assert plain(drop_items(items(), count)) == whole[count:]
    assert count_items(items()) == 6


def test_small_neighbours_of_one_kind_are_joined() -> None:
    large = block_of_rows([np.zeros(1 << 14)])
    parts = [*items(), block_of_rows([6]), block_of_rows(["text"]), block_of_rows(["text"]), large, large]
    assert [count_items([item]) for item in join_items(parts)] == [3, 1, 3, 2, 1, 1]
    assert plain(join_items(parts[:4])) == plain(parts[:4])
