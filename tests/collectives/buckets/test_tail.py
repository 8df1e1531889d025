from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raydist.collectives.buckets.tail import BucketTail, PassStamp, Updates
from raydist.errors import CollectiveMismatchError

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64)
Details = tuple[list[bool], list[bool]] | None


def exchanged(
    stamps: list[PassStamp],
    *,
    dtype: torch.dtype = torch.float32,
    late: int = -1,
    details: dict[int, Details] | None = None,
) -> list[BucketTail]:
    """The tails of all ranks, after their sum."""
    world_size, num_slots = len(stamps), 2
    memories = [torch.full((BucketTail.size(num_slots, world_size),), torch.nan, dtype=dtype) for _ in stamps]
    tails = [BucketTail(memory, num_slots, rank=rank, world_size=world_size) for rank, memory in enumerate(memories)]
    for rank, tail in enumerate(tails):
        tail.write(stamps[rank].encode(), late=rank == late, details=(details or {}).get(rank))
    total = torch.stack(memories).sum(0)
    for memory in memories:
        memory.copy_(total)
    return tails


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_all_in_the_same_pass_with_everything(dtype: torch.dtype, world_size: int) -> None:
    for tail in exchanged([PassStamp(2**32 - 1, 2**16 - 1, adds_up=True)] * world_size, dtype=dtype):
        tail.read()
        assert (tail.complete, tail.late) == (True, False)
        assert tail.details() == ([True, True], [False, False])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rank_learns_what_another_lacks(dtype: torch.dtype) -> None:
    lacking: dict[int, Details] = {0: ([True, False], [False, False]), 1: ([True, False], [True, False])}
    for tail in exchanged([PassStamp(1, 1)] * 2, dtype=dtype, late=1, details=lacking):
        tail.read()
        assert (tail.complete, tail.late) == (False, True)
        assert tail.details() == ([True, False], [True, False])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("other", "said"),
    [
        (PassStamp(258, 7), "rank 1: step 258, backward pass 7, op MEAN"),
        (PassStamp(257, 8), "rank 1: step 257, backward pass 8, op MEAN"),
        (PassStamp(257, 7, adds_up=True), "rank 1: step 257, backward pass 7, op SUM"),
        (PassStamp(257, 7, relayout=True), "op MEAN, layout of trained parameters changes"),
    ],
)
def test_different_passes_are_told_to_every_rank(dtype: torch.dtype, other: PassStamp, said: str) -> None:
    for tail in exchanged([PassStamp(257, 7), other, PassStamp(257, 7)], dtype=dtype):
        with pytest.raises(CollectiveMismatchError, match="rank 0: step 257, backward pass 7, op MEAN;") as caught:
            tail.read()
        assert said in str(caught.value)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1), st.booleans(), st.booleans())
def test_stamps_come_back(step: int, backward: int, adds_up: bool, relayout: bool) -> None:
    encoded = PassStamp(step, backward, adds_up=adds_up, relayout=relayout, updates=Updates(step, (0.5,))).encode()
    place = PassStamp.place_of(encoded)
    assert (place["step"], place["backward pass"]) == (step, backward)
    assert (place["op"], "layout of trained parameters" in place) == ("SUM" if adds_up else "MEAN", relayout)
    assert PassStamp.updates_of(encoded)["optimizer steps"] == step
    assert max(encoded) <= 255


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("others", "said"),
    [
        (Updates(6, (0.1,)), "rank 1: optimizer steps 6, mean learning rate 0.1 "),
        (Updates(7, (0.2,)), "rank 1: optimizer steps 7, mean learning rate 0.2 "),
        (Updates(7, (0.2, 0.0)), "rank 1: optimizer steps 7, mean learning rate 0.1 "),
        (Updates(7), "rank 1: optimizer steps 7, mean learning rate 0 "),
        (Updates(7 + 2**24, (0.1,)), "rank 1: optimizer steps 16777223"),
    ],
)
def test_different_updates_are_told_to_every_rank(dtype: torch.dtype, others: Updates, said: str) -> None:
    mine = PassStamp(257, 7, updates=Updates(7, (0.1,)))
    for tail in exchanged([mine, PassStamp(257, 7, updates=others), mine], dtype=dtype):
        with pytest.raises(CollectiveMismatchError, match="before step 257") as caught:
            tail.read()
        assert "rank 0: optimizer steps 7, mean learning rate 0.1" in str(caught.value)
        assert said in str(caught.value)
        assert "rank 1 differs from the others" in str(caught.value)
