from __future__ import annotations

import numpy as np
import pytest

from raydist.dataset import Dataset
from raydist.values import UNKNOWN_CARDINALITY
from tests.contracts.op import check_op
from tests.pipelines.optimize.rewriting import assert_same, optimised_names


@pytest.mark.parametrize("size", [7, 8, 100, UNKNOWN_CARDINALITY])
@pytest.mark.parametrize("arguments", [(None, True), (3, True), (3, False)])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_order_is_that_of_the_shuffle(size: int, arguments: tuple[int | None, bool], count: int) -> None:
    dataset = Dataset.range(7).shuffle(size, *arguments).repeat(count).take(20)
    assert len(assert_same(dataset, "shuffle_and_repeat_fusion")) == min(20, 7 * count)


def test_only_where_the_buffer_holds_all() -> None:
    rows = Dataset.from_tensor_slices(np.arange(14).reshape(7, 2))
    assert optimised_names(rows.shuffle(7).repeat()) == ["range", "shuffle_and_repeat", "gather"]
    assert optimised_names(rows.shuffle(6).repeat()) == ["range", "shuffle", "repeat", "gather"]
    assert "shuffle" in optimised_names(Dataset.range(9).filter(lambda x: x > 3).shuffle(9).repeat())


def test_nothing_ends() -> None:
    assert list(Dataset.range(0).shuffle(4).repeat()) == []


def test_epochs_differ() -> None:
    dataset = Dataset.range(30).shuffle(30).repeat(2)
    passes = [[int(x) for x in dataset] for _ in range(2)]
    orders = {tuple(order[at : at + 30]) for order in passes for at in (0, 30)}
    assert len(orders) > 2


def test_contract() -> None:
    check_op(lambda: Dataset.range(6).shuffle(10).repeat(3))
    check_op(lambda: Dataset.range(6).shuffle(6, seed=1).repeat().map(lambda x: x + 1))
