from __future__ import annotations

import pytest
import torch

from raydist.collectives.agreement import Agreement
from raydist.collectives.base import Membership
from raydist.collectives.bucket_exchange import BucketExchange, allocate
from raydist.collectives.buckets import BucketLayout, ParameterSpec, plan_buckets
from raydist.collectives.local import LocalGroup, LocalHub
from raydist.errors import CollectiveMismatchError
from tests.collectives.threads import run_ranks

CPU = torch.device("cpu")
# Three buckets of one parameter each: 2, 1, 0.
LAYOUT = plan_buckets([ParameterSpec(index, (2,), torch.float64, CPU) for index in range(3)], bucket_bytes=1)


def value(number: float) -> torch.Tensor:
    return torch.full((2,), number, dtype=torch.float64)


def num_sent(group: LocalGroup) -> int:
    return group.num_calls


def alone(**options: object) -> tuple[LocalGroup, BucketExchange]:
    group = LocalGroup(LocalHub(), Membership("g", 0, 0, 1), timeout_s=5.0).start()
    return group, BucketExchange(group, LAYOUT, allocate(LAYOUT), **options)  # type: ignore[arg-type]  # keyword options


def test_full_buckets_leave_at_once_and_in_order() -> None:
    group, exchange = alone()
    exchange.put(1, value(1))
    assert num_sent(group) == 0
    exchange.put(2, value(2))
    assert num_sent(group) == 2
    exchange.put(0, value(3))
    assert num_sent(group) == 2, "the last one waits for the end"
    gradients = exchange.finish()
    assert num_sent(group) == 3
    assert {index: gradient.value[0].item() for index, gradient in gradients.items()} == {0: 3, 1: 1, 2: 2}


def test_a_held_bucket_stops_those_behind_it() -> None:
    group, exchange = alone(held=(1,))
    for index in range(3):
        exchange.put(index, value(index))
    assert num_sent(group) == 1
    assert len(exchange.finish()) == 3


def test_gradients_that_appear_twice_are_added_up() -> None:
    group, exchange = alone()
    exchange.put(2, value(1))  # leaves at once
    exchange.put(0, value(1), scale=2.0)  # stays
    for index in (2, 0):
        exchange.put(index, value(10), scale=0.5)
        exchange.put(index, value(100))
    assert list(exchange.late) == [2]
    gradients = exchange.finish()
    assert {index: gradient.value[0].item() for index, gradient in gradients.items()} == {0: 107, 2: 106}


def test_late_gradients_of_one_rank_reach_the_others() -> None:
    def body(group: LocalGroup) -> dict[int, float]:
        exchange = BucketExchange(group, LAYOUT, allocate(LAYOUT))
        exchange.put(2, None if group.rank else value(1))
        if group.rank == 1:
            exchange.put(2, value(7))
        return {index: gradient.value[0].item() for index, gradient in exchange.finish().items()}

    assert run_ranks(2, body) == [{2: 8.0}, {2: 8.0}]


def test_preloaded_gradients_wait_for_their_pass() -> None:
    group, exchange = alone()
    exchange.preload(2, value(5))
    assert num_sent(group) == 0
    exchange.put(2, value(1))
    assert exchange.finish()[2].value.tolist() == [6, 6]


def test_nothing_leaves_before_the_ranks_agree() -> None:
    def body(group: LocalGroup) -> int:
        agreement = Agreement(group, "it", {"x": group.rank})
        exchange = BucketExchange(group, LAYOUT, allocate(LAYOUT), agreement=agreement)
        with pytest.raises(CollectiveMismatchError):
            exchange.put(2, value(1))
        return num_sent(group)

    assert run_ranks(2, body) == [1, 1]


def test_nothing_to_reduce() -> None:
    group = LocalGroup(LocalHub(), Membership("g", 0, 0, 1), timeout_s=5.0).start()
    assert BucketExchange(group, BucketLayout(()), []).finish() == {}
