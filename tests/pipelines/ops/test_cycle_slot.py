from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raydist.core.errors import FailedPreconditionError
from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import count_items
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.ops.cycle import CycleSlot, weave
from raydist.pipelines.run.plan import open_iterator
from raydist.pipelines.sources.range import RangeOp


def slot(start: int, stop: int) -> CycleSlot:
    op = RangeOp(start, stop)
    source = open_iterator(op, seed=0, epoch=0, options=Options(), executor=InlineExecutor())
    return CycleSlot(0, ({}, 0), source)


def test_whole_rounds_are_woven() -> None:
    slots = [slot(0, 9), slot(10, 19)]
    woven = weave(slots, block_length=2, rounds=3)
    assert woven is not None
    assert woven.columns[0].tolist() == [0, 1, 10, 11, 2, 3, 12, 13, 4, 5, 14, 15]
    assert [one.items_out for one in slots] == [6, 6]


def test_the_shortest_slot_limits_the_rounds() -> None:
    slots = [slot(0, 9), slot(10, 13)]
    woven = weave(slots, block_length=1, rounds=5)
    assert woven is not None
    assert woven.columns[0].tolist() == [0, 10, 1, 11, 2, 12]
    assert weave(slots, block_length=1, rounds=5) is None
    assert [count_items(one.take(9)) for one in slots] == [6, 0]


def test_a_state_counts_what_was_taken_of_a_block_read_ahead() -> None:
    first = slot(0, 9)
    assert first.ready(wanted=4, needed=1) is not None
    first.take(3)
    assert first.state_dict()["skip"] == 3
    for state in (first.state_dict(), None):
        resumed = slot(0, 9)
        resumed.restore(3, state)
        (block,) = resumed.take(2)
        assert isinstance(block, Block)
        assert block.columns[0].tolist() == [3, 4]
        assert resumed.items_out == 5


def test_a_shorter_dataset_cannot_be_resumed() -> None:
    with pytest.raises(FailedPreconditionError, match="the same elements again to resume after 5"):
        slot(0, 3).restore(5, None)


def test_elements_without_numbers_are_woven_too() -> None:
    def empty(n: Any) -> Dataset:
        return Dataset.from_tensor_slices((np.full(40, n), np.empty((40, 0, 2))))

    found = list(Dataset.range(4).interleave(empty, cycle_length=4, block_length=2))
    assert [int(n) for n, _ in found[:16]] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert len(found) == 160
    assert {tuple(row.shape) for _, row in found} == {(0, 2)}
