from __future__ import annotations

import numpy as np

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import StageResult
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.engine.block_size import BlockSize


def learn(size: BlockSize, rows: int, seconds: float, row_bytes: int = 8) -> None:
    block = block_of_rows([np.zeros(row_bytes, np.uint8)] * rows)
    assert isinstance(block, Block)
    size.learn(block, StageResult((block,), (rows,), ("",), busy_s=seconds))


def test_the_consumer_is_given_what_it_wants_within_a_number_of_bytes() -> None:
    size = BlockSize(away=False)
    assert [size.rows(limit, 4, 1) for limit in (1, 4, 9, 10**6)] == [1, 1, 3, 64]
    learn(size, rows=3, seconds=0.001, row_bytes=1 << 10)
    assert size.rows(10**6, 4, 1) == 4096
    learn(size, rows=3, seconds=0.001, row_bytes=1 << 20)
    assert size.rows(10**6, 4, 1) == 8
    assert size.rows(1, 1, 5) == 5


def test_elements_of_known_size_need_no_first_small_block() -> None:
    assert BlockSize(away=False, element_bytes=792).rows(2560, 1, 1) == 2560
    assert BlockSize(away=False, element_bytes=4 << 20).rows(2560, 1, 1) == 2


def test_blocks_for_other_processes_grow_until_they_are_worth_their_way() -> None:
    size = BlockSize(away=True)
    grown = []
    for _ in range(12):
        rows = size.rows(1, 4, 1)
        grown.append(rows)
        learn(size, rows, seconds=rows * 10e-6)
    assert grown == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 1000]


def test_heavy_elements_stay_in_small_blocks() -> None:
    size = BlockSize(away=True)
    learn(size, rows=1, seconds=0.05)
    assert size.rows(1, 4, 1) == 1


def test_a_slow_input_is_not_asked_for_more_than_is_wanted() -> None:
    size = BlockSize(away=True)
    for _ in range(6):
        learn(size, size.rows(1, 4, 1), seconds=1e-6)
    assert size.rows(1, 4, 1) == 64
    for _ in range(3):
        size.learn_input(0.5)
    assert size.rows(1, 4, 1) == 8


def test_blocks_are_multiples_of_what_the_consumer_takes_together() -> None:
    size = BlockSize(away=False, together=10)
    learn(size, rows=3, seconds=0.001)
    assert [size.rows(limit, 3, 1) for limit in (10, 30, 100)] == [10, 10, 40]
    assert [size.rows(limit, 1, 1) for limit in (20, 7, 3)] == [20, 7, 3], "a rest is completed, and no more"
    assert BlockSize(away=False, together=100).rows(200, 2, 1) == 64, "nothing is known of the size of elements"


def test_blocks_stay_multiples_of_it_where_no_more_rows_fit() -> None:
    size = BlockSize(away=False, together=3)
    learn(size, rows=3, seconds=0.001, row_bytes=1 << 20)
    assert size.rows(100, 1, 1) == 6, "of 8 that fit"
    large = BlockSize(away=False, together=10)
    learn(large, rows=3, seconds=0.001, row_bytes=1 << 20)
    assert large.rows(100, 1, 1) == 8


def test_a_batch_that_is_made_elsewhere_may_be_larger() -> None:
    size = BlockSize(away=True, together=20)
    learn(size, rows=3, seconds=0.1, row_bytes=1 << 20)
    assert [size.rows(limit, 1, 1) for limit in (20, 100, 3)] == [20, 20, 3]
    size = BlockSize(away=True, together=40)
    learn(size, rows=3, seconds=0.1, row_bytes=1 << 20)
    assert size.rows(100, 1, 1) == 16
