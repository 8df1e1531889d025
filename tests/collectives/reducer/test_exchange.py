"""The exchange of one pass, and its trailer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raydist.collectives.base import Communicator, Membership
from raydist.collectives.reducer.buckets import Buckets
from raydist.collectives.reducer.exchange import Exchange, StepWeight
from raydist.collectives.reducer.trailer import ReceivedTrailer, Trailer, encode_stamp
from raydist.core.errors import CollectiveMismatchError, FailedPreconditionError
from tests.collectives.local_group import LocalGroup, LocalHub
from tests.collectives.threads import run_ranks


class Rank:
    """Runs passes over parameters of two elements, in buckets of one each."""

    def __init__(self, communicator: Communicator, num_parameters: int = 3, *, bucket_bytes: int = 1) -> None:
        self.parameters = {number: nn.Parameter(torch.zeros(2)) for number in range(num_parameters)}
        self.buckets = Buckets(communicator, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes)
        self.communicator = communicator
        self.num_passes = 0

    def open(self, trained: tuple[int, ...], scale: float = 1.0, hold_with: tuple[int, ...] = ()) -> Exchange:
        self.num_passes += 1
        kinds = tuple((index, torch.float32, torch.Size([2])) for index in trained)
        plan = self.buckets.begin_pass(kinds, self.parameters, step=0, backward=self.num_passes)
        stamp = encode_stamp(0, self.num_passes)
        weight = StepWeight(scale, counts=True)
        return Exchange(self.communicator, self.buckets, plan, stamp, None, weight, hold_with=hold_with)

    def run(self, trained: tuple[int, ...], order: tuple[int, ...] | None = None) -> dict[int, torch.Tensor]:
        exchange = self.open(trained)
        for index in trained if order is None else order:
            exchange.put(index, value(index))
        return self.end(exchange)

    def end(self, exchange: Exchange) -> dict[int, torch.Tensor]:
        exchange.finish()
        found = exchange.gradients()
        self.order = list(found)
        return found


def value(number: float) -> torch.Tensor:
    return torch.full((2,), float(number))


def alone() -> Rank:
    """A rank that has had its first pass, with buckets in the order 2, 1, 0."""
    rank = Rank(LocalGroup(LocalHub(), Membership("g", 0, 0, 1), timeout_s=5.0).start())
    rank.run((0, 1, 2), (2, 1, 0))
    return rank


def test_a_gradient_that_comes_again_after_it_was_sent_is_an_error() -> None:
    rank = alone()
    exchange = rank.open((0, 1, 2))
    exchange.put(2, value(1))
    with pytest.raises(FailedPreconditionError, match=r"parameter 2 has come again.*use_reentrant=False"):
        exchange.put(2, value(1))
    # What was sent in a pass that failed is waited for before its memory is used again.
    values = rank.run((0, 1, 2), tuple(rank.order))
    assert [values[index].tolist() for index in range(3)] == [[0.0] * 2, [1.0] * 2, [2.0] * 2]


def test_buckets_wait_where_gradients_may_come_twice() -> None:
    rank = alone()
    exchange = rank.open((0, 1, 2), 0.5, hold_with=(1,))
    for index in (2, 1, 0, 1):
        exchange.put(index, value(2))
    assert rank.end(exchange)[1].tolist() == [2.0, 2.0]
    assert exchange.repeated == {1}
    exchange = rank.open((0, 1, 2))
    exchange.hold()  # a segment of a checkpoint begins
    for index in (2, 1, 0, 2):
        exchange.put(index, value(2))
    assert rank.end(exchange)[2].tolist() == [4.0, 4.0]


def test_every_bucket_is_a_range_in_a_trace() -> None:
    rank = alone()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        rank.run((0, 1, 2))
    names = {event.key for event in profile.key_averages()}
    assert {"raydist::bucket 0", "raydist::bucket 1", "raydist::bucket 2"} | {"raydist::wait for bucket 2"} <= names


def test_a_pass_costs_its_buckets_alone() -> None:
    def body(group: LocalGroup) -> list[int]:
        rank, counts = Rank(group), []
        for trained in [(0, 1), (0, 1), (0,), (0, 1), (0,), (), ()]:
            before = group.num_calls
            rank.run(trained, trained[::-1])
            counts.append(group.num_calls - before)
        return counts

    # An exchange on the host takes two: an agreement on the parameters, and in their first pass on a layout.
    assert run_ranks(2, body) == [[2 + 2 + 2, 2, 2 + 2 + 1, 2 + 2, 2 + 1, 2, 0]] * 2


def test_buckets_are_laid_out_in_the_order_in_which_the_first_rank_saw_gradients() -> None:
    def body(group: LocalGroup) -> list[list[int]]:
        rank = Rank(group, 4)
        layouts = []
        for order in [(1, 3, 0, 1), (0, 1, 3)]:
            rank.run((0, 1, 2, 3), order if group.rank == 0 else (3, 2, 1, 0))
            layouts.append(rank.order)
        values = rank.run((0, 1, 2, 3))
        assert {index: value[0].item() for index, value in values.items()} == {0: 0, 1: 2, 2: 4, 3: 6}
        return layouts

    assert run_ranks(2, body) == [[[3, 0, 1, 2]] * 2] * 2


def test_memory_is_kept_and_gradients_that_somebody_holds_are_left_alone() -> None:
    def body(group: LocalGroup) -> None:
        rank = Rank(group)
        addresses, held = [], []
        for round_ in range(5):
            values = rank.run((1,))
            addresses.append(values[1].data_ptr())
            if round_ in (1, 2):
                held.append(values[1])
            del values
        own, other = addresses[0], addresses[2]
        assert addresses == [own, own, other, addresses[3], addresses[3]]
        assert len({own, other, addresses[3]}) == 3
        assert [value.tolist() for value in held] == [[2.0, 2.0]] * 2
        held.clear()
        assert rank.run((1,))[1].data_ptr() == own

    run_ranks(2, body)


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64)
NUM_PARAMETERS = 2


def exchanged(
    stamps: list[bytes],
    *,
    dtype: torch.dtype = torch.float32,
    present: dict[int, list[bool]] | None = None,
    checksums: dict[int, float] | None = None,
) -> list[ReceivedTrailer]:
    """The trailers that all ranks receive, after their sum."""
    world_size = len(stamps)
    size = Trailer.size(NUM_PARAMETERS, world_size)
    memories = [torch.full((size,), torch.nan, dtype=dtype) for _ in stamps]
    trailers = [Trailer(each, NUM_PARAMETERS, rank=rank, world_size=world_size) for rank, each in enumerate(memories)]
    for rank, trailer in enumerate(trailers):
        checksum = (checksums or {}).get(rank)
        trailer.write(
            stamps[rank],
            present=(present or {}).get(rank),
            checksum=None if checksum is None else torch.tensor(checksum, dtype=torch.float64),
        )
    total = torch.stack(memories).sum(0)
    return [trailer.received(total) for trailer in trailers]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rank_learns_what_another_lacks_and_checksums_are_compared_bit_by_bit(dtype: torch.dtype) -> None:
    for world_size in (1, 2, 5):
        stamps = [encode_stamp(2**32 - 1, 2**16 - 1, adds_up=True, calls=2**32 - 1)] * world_size
        for received in exchanged(stamps, dtype=dtype):
            received.check()
            assert (received.present, received.checksums_differ) == (None, False)
    stamps = [encode_stamp(1, 1)] * 3
    for received in exchanged(stamps[:2], dtype=dtype, present={0: [True, False], 1: [False, False]}):
        received.check()
        assert received.present == [True, False]
    for received in exchanged(stamps[:2], dtype=dtype, present={0: [False, False]}):
        assert received.present == [True, True]
    same = exchanged(stamps, dtype=dtype, checksums=dict.fromkeys(range(3), 0.1))
    other = exchanged(stamps, dtype=dtype, checksums={0: 0.1, 1: 0.1 + 2**-56, 2: 0.1})
    some = exchanged(stamps, dtype=dtype, checksums={0: 0.1})
    assert [received.checksums_differ for received in (*same, *other, *some)] == [False] * 3 + [True] * 6
    assert all(received.present is None for received in (*same, *other, *some))


def test_other_sequences_of_collectives_are_told_to_every_rank() -> None:
    for received in exchanged([encode_stamp(257, 7, calls=10), encode_stamp(257, 7, calls=11)]):
        with pytest.raises(CollectiveMismatchError, match=r"same order.* 7 of step 257 .*0000000a, 0000000b"):
            received.check()
