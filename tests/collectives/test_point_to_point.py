"""Messages of Ray's groups: their order, limits and errors."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator

import pytest
import torch

from raydist.collectives.ray_backend import PointToPoint
from raydist.collectives.rendezvous import RendezvousStore
from raydist.errors import CollectiveMismatchError, DeadlineExceededError, InvalidArgumentError, UnavailableError
from tests.collectives.threads import begin_threads

pytestmark = pytest.mark.timeout(60)

DTYPES = (torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.int16, torch.uint8, torch.bool)


def rank_of(store: RendezvousStore, rank: int, timeout_s: float = 5.0) -> PointToPoint:
    return PointToPoint(store.membership("g", generation=0, rank=rank, world_size=3), timeout_s)


@pytest.fixture
def store() -> Iterator[RendezvousStore]:
    with RendezvousStore() as opened:
        yield opened


@pytest.fixture
def ranks(store: RendezvousStore) -> Iterator[list[PointToPoint]]:
    made = [rank_of(store, rank) for rank in (0, 1)]
    yield made
    for rank in made:
        rank.close()
        rank.close()


def test_messages_arrive_in_their_order_and_both_ways(ranks: list[PointToPoint]) -> None:
    lengths = (3, 100_000, 0, 2)

    def first() -> float:
        for n in lengths:
            ranks[0].send(torch.full((n,), float(n)), 1)
        answer = torch.zeros(1)
        ranks[0].recv(answer, 1)
        return answer.item()

    def second() -> list[list[float]]:
        received = [torch.zeros(n) for n in lengths]
        for tensor in received:
            ranks[1].recv(tensor, 0)
        ranks[1].send(torch.tensor([9.0]), 0)
        return [tensor.unique().tolist() for tensor in received]

    assert begin_threads({0: first, 1: second})() == {0: 9.0, 1: [[3.0], [100_000.0], [], [2.0]]}


def test_every_dtype_and_strided_views(ranks: list[PointToPoint]) -> None:
    values = [(torch.arange(6) % 2).reshape(2, 3).to(dtype).t() for dtype in DTYPES]

    def receive() -> bool:
        received = [torch.zeros(2, 3, dtype=dtype).t() for dtype in DTYPES]
        for tensor in received:
            ranks[1].recv(tensor, 0)
        return all(torch.equal(mine, theirs) for mine, theirs in zip(received, values, strict=True))

    def send() -> None:
        for tensor in values:
            ranks[0].send(tensor, 1)

    assert begin_threads({0: send, 1: receive})()[1] is True


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int32)])
def test_another_shape_or_dtype_is_an_error_and_the_next_message_is_taken(
    ranks: list[PointToPoint], wrong: torch.Tensor
) -> None:
    def send() -> None:
        ranks[0].send(torch.ones(2), 1)
        ranks[0].send(torch.full((2,), 5.0), 1)

    def receive() -> list[float]:
        with pytest.raises(CollectiveMismatchError, match=r"on rank 1 for torch.float32 \(2,\) from rank 0"):
            ranks[1].recv(wrong, 0)
        right = torch.zeros(2)
        ranks[1].recv(right, 0)
        return right.tolist()

    assert begin_threads({0: send, 1: receive})()[1] == [5.0, 5.0]


def test_a_rank_that_does_not_connect_is_named_after_the_limit(store: RendezvousStore) -> None:
    alone = rank_of(store, 1, timeout_s=0.5)
    began = time.monotonic()
    with pytest.raises(DeadlineExceededError, match=r"send\(to=0\) by rank 1 of 3 "):
        alone.send(torch.ones(1), 0)
    assert time.monotonic() - began < 10


def test_a_rank_that_leaves_ends_the_wait_of_the_other(ranks: list[PointToPoint]) -> None:
    begin_threads(
        {0: functools.partial(ranks[0].send, torch.ones(1), 1), 1: functools.partial(ranks[1].recv, torch.zeros(1), 0)}
    )()
    waiting = begin_threads({1: functools.partial(ranks[1].recv, torch.zeros(1), 0)})
    time.sleep(0.2)
    ranks[0].close()
    error = waiting()[1]
    assert isinstance(error, UnavailableError), error
    assert "recv(from=0) by rank 1 of 3" in str(error)


@pytest.mark.parametrize("other", [1, 3, -1])
def test_a_rank_that_cannot_be_is_refused(ranks: list[PointToPoint], other: int) -> None:
    for start in (ranks[1].send, ranks[1].recv):
        with pytest.raises(InvalidArgumentError, match=f"another rank of group 'g', 0 to 2, got {other} on rank 1"):
            start(torch.ones(1), other)
