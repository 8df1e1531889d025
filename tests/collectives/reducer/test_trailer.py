from __future__ import annotations

import pytest
import torch

from raydist.collectives.reducer.trailer import ReceivedTrailer, Trailer, Updates, encode_stamp
from raydist.errors import CollectiveMismatchError

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
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_all_in_the_same_pass_with_everything(dtype: torch.dtype, world_size: int) -> None:
    for received in exchanged(
        [encode_stamp(2**32 - 1, 2**16 - 1, adds_up=True, calls=2**32 - 1)] * world_size, dtype=dtype
    ):
        received.check()
        assert (received.present, received.checksums_differ) == (None, False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rank_learns_what_another_lacks(dtype: torch.dtype) -> None:
    for received in exchanged([encode_stamp(1, 1)] * 2, dtype=dtype, present={0: [True, False], 1: [False, False]}):
        received.check()
        assert received.present == [True, False]
    for received in exchanged([encode_stamp(1, 1)] * 2, dtype=dtype, present={0: [False, False]}):
        assert received.present == [True, True]


@pytest.mark.parametrize("dtype", DTYPES)
def test_checksums_are_compared_bit_by_bit(dtype: torch.dtype) -> None:
    stamps = [encode_stamp(1, 1)] * 3
    same = exchanged(stamps, dtype=dtype, checksums=dict.fromkeys(range(3), 0.1))
    other = exchanged(stamps, dtype=dtype, checksums={0: 0.1, 1: 0.1 + 2**-56, 2: 0.1})
    some = exchanged(stamps, dtype=dtype, checksums={0: 0.1})
    assert [received.checksums_differ for received in (*same, *other, *some)] == [False] * 3 + [True] * 6
    assert all(received.present is None for received in (*same, *other, *some))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("other", "said"),
    [
        (encode_stamp(258, 7), "rank 1: step 258, backward pass 7, op MEAN"),
        (encode_stamp(257, 8), "rank 1: step 257, backward pass 8, op MEAN"),
        (encode_stamp(257, 7, adds_up=True), "rank 1: step 257, backward pass 7, op SUM"),
    ],
)
def test_different_passes_are_told_to_every_rank(dtype: torch.dtype, other: bytes, said: str) -> None:
    for received in exchanged([encode_stamp(257, 7), other, encode_stamp(257, 7)], dtype=dtype):
        with pytest.raises(CollectiveMismatchError, match="rank 0: step 257, backward pass 7, op MEAN;") as caught:
            received.check()
        assert said in str(caught.value)


def test_other_sequences_of_collectives_are_told_to_every_rank() -> None:
    for received in exchanged([encode_stamp(257, 7, calls=10), encode_stamp(257, 7, calls=11)]):
        with pytest.raises(CollectiveMismatchError, match=r"same order.* 7 of step 257 .*0000000a, 0000000b"):
            received.check()


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
def test_different_updates_are_told_to_every_rank(others: Updates, said: str) -> None:
    mine = encode_stamp(257, 7, updates=Updates(7, (0.1,)))
    for received in exchanged([mine, encode_stamp(257, 7, updates=others), mine]):
        with pytest.raises(CollectiveMismatchError, match="before step 257") as caught:
            received.check()
        assert "rank 0: optimizer steps 7, mean learning rate 0.1" in str(caught.value)
        assert said in str(caught.value)
        assert "rank 1 differs from the others" in str(caught.value)
