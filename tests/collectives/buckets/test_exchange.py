from __future__ import annotations

import pytest
import torch

from raydist.collectives.base import Membership
from raydist.collectives.buckets.buffer import BucketBuffer
from raydist.collectives.buckets.exchange import BucketExchange, make_buffers
from raydist.collectives.buckets.forms import GlobalGradient, StepWeight
from raydist.collectives.buckets.layout import BucketLayout, ParameterSpec, plan_buckets
from raydist.collectives.buckets.tail import PassStamp
from raydist.collectives.local import LocalGroup, LocalHub
from raydist.errors import CollectiveMismatchError
from tests.collectives.threads import run_ranks

CPU = torch.device("cpu")
# Three buckets of one parameter each: 2, 1, 0.
LAYOUT = plan_buckets([ParameterSpec(index, (2,), torch.float64, CPU) for index in range(3)], bucket_bytes=1)
FULL = StepWeight(1.0, counts=True)


def value(number: float) -> torch.Tensor:
    return torch.full((2,), number, dtype=torch.float64)


def num_sent(group: LocalGroup) -> int:
    return group.num_calls


def opened(
    group: LocalGroup,
    *,
    layout: BucketLayout = LAYOUT,
    weight: StepWeight = FULL,
    held: tuple[int, ...] = (),
    backward: int = 1,
) -> BucketExchange:
    flats = [torch.empty(BucketBuffer.numel(bucket, group.world_size), dtype=bucket.dtype) for bucket in layout.buckets]
    buffers = make_buffers(layout, flats, group)
    return BucketExchange(group, layout, buffers, PassStamp(0, backward), weight, held=held)


def alone(weight: StepWeight = FULL, *, held: tuple[int, ...] = ()) -> tuple[LocalGroup, BucketExchange]:
    group = LocalGroup(LocalHub(), Membership("g", 0, 0, 1), timeout_s=5.0).start()
    return group, opened(group, weight=weight, held=held)


def finished(exchange: BucketExchange) -> dict[int, GlobalGradient]:
    exchange.finish()
    return exchange.gradients()


def firsts(gradients: dict[int, GlobalGradient]) -> dict[int, float]:
    return {index: gradient.value[0].item() for index, gradient in gradients.items()}


def test_full_buckets_leave_at_once_and_in_order() -> None:
    group, exchange = alone()
    exchange.put(1, value(1))
    assert num_sent(group) == 0
    exchange.put(2, value(2))
    assert num_sent(group) == 2
    exchange.put(0, value(3))
    assert num_sent(group) == 2, "the last one waits for the end"
    gradients = finished(exchange)
    assert num_sent(group) == 3
    assert exchange.complete
    assert firsts(gradients) == {0: 3, 1: 1, 2: 2}
    lent = {index: v for indices, values in exchange.lend() for index, v in zip(indices, values, strict=True)}
    assert {index: v[0].item() for index, v in lent.items()} == {0: 3, 1: 1, 2: 2}


def test_a_held_bucket_stops_those_behind_it() -> None:
    group, exchange = alone(held=(1,))
    for index in range(3):
        exchange.put(index, value(index))
    assert num_sent(group) == 1
    assert len(finished(exchange)) == 3


def test_gradients_that_appear_twice_are_added_up_and_weighted() -> None:
    group, exchange = alone(StepWeight(0.5, counts=True))
    exchange.put(2, value(2))  # leaves at once
    exchange.put(0, value(4))  # stays
    for index in (2, 0):
        exchange.put(index, value(10))
        exchange.put(index, value(200))
    assert list(exchange.late) == [2]
    assert firsts(finished(exchange)) == {0: 107, 2: 106}
    assert not exchange.complete


def test_late_gradients_of_one_rank_reach_the_others() -> None:
    def body(group: LocalGroup) -> dict[int, float]:
        exchange = opened(group)
        exchange.put(2, value(0 if group.rank else 1))
        if group.rank == 1:
            exchange.put(2, value(7))
        return firsts(finished(exchange))

    assert run_ranks(2, body) == [{2: 8.0}, {2: 8.0}]


def test_a_rank_that_does_not_count_sends_zeros() -> None:
    def body(group: LocalGroup) -> dict[int, float]:
        exchange = opened(group, weight=StepWeight(1.0, counts=group.rank == 0))
        for index in (2, 1) if group.rank == 0 else (2, 0):
            exchange.put(index, value(torch.nan if group.rank else 5))
        if group.rank == 1:
            exchange.put(2, value(torch.nan))  # late
        return firsts(finished(exchange))

    assert run_ranks(2, body) == [{2: 5.0, 1: 5.0}, {2: 5.0, 1: 5.0}]


def test_preloaded_gradients_wait_for_their_pass() -> None:
    group, exchange = alone(StepWeight(0.5, counts=True))
    exchange.preload(2, value(5))
    assert num_sent(group) == 0
    exchange.put(2, value(2))
    assert finished(exchange)[2].value.tolist() == [6, 6]


def test_preloaded_gradients_without_new_ones() -> None:
    _, exchange = alone()
    exchange.preload(2, value(5))
    assert firsts(finished(exchange)) == {2: 5}


def test_ranks_in_different_passes_are_told_with_the_first_bucket() -> None:
    def body(group: LocalGroup) -> int:
        exchange = opened(group, backward=1 + group.rank)
        exchange.put(2, value(1))
        with pytest.raises(CollectiveMismatchError, match=r"rank 0: .*backward pass 1.*rank 1: .*backward pass 2"):
            exchange.finish()
        return num_sent(group)

    assert run_ranks(2, body) == [3, 3]


def test_every_bucket_is_a_range_in_a_trace() -> None:
    _, exchange = alone()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for index in range(3):
            exchange.put(index, value(1))
        exchange.finish()
    names = {event.key for event in profile.key_averages()}
    assert {"raydist::bucket 0", "raydist::bucket 1", "raydist::bucket 2"} | {"raydist::wait for bucket 2"} <= names


def test_nothing_to_reduce() -> None:
    group = LocalGroup(LocalHub(), Membership("g", 0, 0, 1), timeout_s=5.0).start()
    assert finished(opened(group, layout=BucketLayout(()))) == {}


def test_one_bucket_takes_all_gradients_at_once() -> None:
    layout = plan_buckets([ParameterSpec(index, (2,), torch.float64, CPU) for index in range(3)], bucket_bytes=1 << 20)
    group, exchange = alone()
    assert not exchange.leaves_at_end
    exchange = opened(group, layout=layout)
    assert exchange.leaves_at_end
    exchange.put_all([(2, value(1)), (0, value(2))])
    assert num_sent(group) == 0
    assert firsts(finished(exchange)) == {0: 2, 2: 1}
    assert not exchange.complete
    exchange = opened(group, layout=layout)
    exchange.put_all([(index, value(index)) for index in range(3)])
    assert firsts(finished(exchange)) == {0: 0, 1: 1, 2: 2}
    assert exchange.complete
