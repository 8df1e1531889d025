"""Limits, errors and the end of messages; that they arrive is in the contract of communicators."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from raydist.collectives import point_to_point
from raydist.collectives.point_to_point import BackgroundQueue, PointToPoint
from raydist.collectives.rendezvous import RendezvousStore
from raydist.errors import (
    CancelledError,
    CollectiveMismatchError,
    DeadlineExceededError,
    InvalidArgumentError,
    UnavailableError,
)

Check = Callable[[str, int], None]

pytestmark = pytest.mark.timeout(60)


LIMIT_S = 2.0  # gloo keeps a thread for what was given up until the limit is over


def no_check(name: str, peer: int) -> None:
    """The group has not failed."""


def rank_of(store: RendezvousStore, rank: int, timeout_s: float = LIMIT_S, check: Check = no_check) -> PointToPoint:
    return PointToPoint(store.membership("g", generation=0, rank=rank, world_size=3), timeout_s, check)


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
    sent = [ranks[0].send(torch.full((n,), float(n)), 1) for n in (3, 100_000, 0, 2)]
    back = ranks[1].send(torch.tensor([9.0]), 0)
    received = [torch.zeros(n) for n in (3, 100_000, 0, 2)]
    for work in [ranks[1].recv(tensor, 0) for tensor in received]:
        work.wait()
    assert [tensor.unique().tolist() for tensor in received] == [[3.0], [100_000.0], [], [2.0]]
    answer = torch.zeros(1)
    ranks[0].recv(answer, 1).wait()
    assert answer.item() == 9.0
    for work in (*sent, back):
        work.wait()


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int32)])
def test_another_shape_or_dtype_is_an_error_and_the_next_message_is_taken(
    ranks: list[PointToPoint], wrong: torch.Tensor
) -> None:
    sent = [ranks[0].send(torch.ones(2), 1), ranks[0].send(torch.full((2,), 5.0), 1)]
    with pytest.raises(CollectiveMismatchError, match=r"on rank 1 for torch.float32 \(2,\) from rank 0"):
        ranks[1].recv(wrong, 0).wait()
    right = torch.zeros(2)
    ranks[1].recv(right, 0).wait()
    assert right.tolist() == [5.0, 5.0]
    for work in sent:
        work.wait()


def test_a_limit_ends_the_wait_and_not_the_message(ranks: list[PointToPoint]) -> None:
    tensor = torch.zeros(1)
    work = ranks[1].recv(tensor, 0)
    late = r"recv\(from=0\) by rank 1 of 3 .* timed out after 0.1 s. No sign of rank 0. Wait again"
    with pytest.raises(DeadlineExceededError, match=late):
        work.wait(0.1)
    ranks[0].send(torch.ones(1), 1).wait()
    work.wait()
    assert tensor.item() == 1.0


def test_a_rank_that_does_not_connect_is_named_after_the_groups_limit(store: RendezvousStore) -> None:
    alone = rank_of(store, 1, timeout_s=0.5)
    began = time.monotonic()
    with pytest.raises(DeadlineExceededError, match=r"send\(to=0\) .* timed out after 0.5 s. No sign of rank 0"):
        alone.send(torch.ones(1), 0).wait()
    assert time.monotonic() - began < 10
    alone.close()


def test_a_failure_of_the_group_ends_the_wait(store: RendezvousStore) -> None:
    def aborted(name: str, peer: int) -> None:
        raise CancelledError(f"rank 2 aborted {name}, with {peer}")

    alone = rank_of(store, 1, check=aborted)
    with pytest.raises(CancelledError, match=r"rank 2 aborted recv\(from=0\), with 0"):
        alone.recv(torch.zeros(1), 0).wait()
    alone.close()


def test_a_rank_that_leaves_ends_the_wait_of_the_other(ranks: list[PointToPoint]) -> None:
    sending = ranks[0].send(torch.ones(1), 1)
    ranks[1].recv(torch.zeros(1), 0).wait()
    sending.wait()
    work = ranks[1].recv(torch.zeros(1), 0)
    ranks[0].close()
    with pytest.raises((UnavailableError, CancelledError), match="rank 0"):
        work.wait()


def test_close_ends_what_is_under_way(ranks: list[PointToPoint]) -> None:
    ranks[0].send(torch.ones(1), 1)
    ranks[1].recv(torch.zeros(1), 0).wait()
    work = ranks[1].recv(torch.zeros(1), 0)
    threading.Timer(0.2, ranks[1].close).start()
    with pytest.raises((UnavailableError, CancelledError)):
        work.wait()


def test_a_rank_sends_nothing_to_itself(ranks: list[PointToPoint]) -> None:
    for start in (ranks[1].send, ranks[1].recv):
        with pytest.raises(InvalidArgumentError, match="must go to another rank, got 1, which is this one"):
            start(torch.ones(1), 1)


def raising() -> None:
    raise ValueError("this one")


def test_a_queue_goes_on_after_an_error_and_rests_when_it_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(point_to_point, "_IDLE_S", 0.05)
    queue = BackgroundQueue("raydist-test-queue", lambda: None)
    done: list[int] = []
    tasks: list[Callable[[], None]] = [lambda: done.append(1), raising, lambda: done.append(2)]
    futures = [queue.submit(task) for task in tasks]
    futures[2].result(5)
    with pytest.raises(ValueError, match="this one"):
        futures[1].result(5)
    assert done == [1, 2]

    def running() -> bool:
        return any(thread.name == "raydist-test-queue" for thread in threading.enumerate())

    deadline = time.monotonic() + 5
    while running():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    queue.submit(lambda: done.append(3)).result(5)
    assert done == [1, 2, 3]
