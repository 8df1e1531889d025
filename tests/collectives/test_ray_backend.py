"""Ray's collective groups over our communicators, and their point-to-point messages."""

from __future__ import annotations

import functools
import itertools
import time
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.util import collective
from ray.util.collective.types import Backend
from ray.util.collective.types import ReduceOp as RayReduceOp

from raydist.collectives.base import Communicator, Membership
from raydist.collectives.ray_backend import (
    BACKEND,
    PointToPoint,
    create_group,
    destroy_group,
    group_limits,
    register,
)
from raydist.collectives.rendezvous import RendezvousStore
from raydist.core.errors import CollectiveMismatchError, DeadlineExceededError, InvalidArgumentError, UnavailableError
from raydist.core.values import ReduceOp
from tests.collectives.threads import begin_threads
from tests.conftest import live_actors

pytestmark = pytest.mark.timeout(180)

CPU = torch.device("cpu")
LIMIT_S = 100.0


class Member:
    """A rank in an actor."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self.rank = rank

    def with_rays_functions(self, name: str, backend: str) -> list[Any]:
        """Everything that ray.util.collective offers, on a group that Ray creates."""
        register()
        with group_limits(device=CPU, timeout_s=30.0, backend=backend):
            collective.init_collective_group(2, self.rank, backend=Backend(BACKEND), group_name=name)
        try:
            return self._call_everything(name)
        finally:
            destroy_group(name)

    def declared(self, name: str) -> list[Any]:
        """The same on a group that the driver has declared: it is made with the first call."""
        register()
        return self._call_everything(name)

    def leave(self, name: str) -> None:
        destroy_group(name)

    def _call_everything(self, name: str) -> list[Any]:
        summed = np.full(3, self.rank + 1.0)
        collective.allreduce(summed, name)
        largest = torch.tensor([self.rank])
        collective.allreduce(largest, name, op=RayReduceOp.MAX)
        told = torch.tensor([float(self.rank)])
        collective.broadcast(told, 1, name)
        gathered = [torch.zeros(2) for _ in range(2)]
        collective.allgather(gathered, torch.full((2,), float(self.rank)), name)
        scattered = torch.zeros(1)
        collective.reducescatter(scattered, [torch.ones(1), torch.full((1,), 2.0)], name)
        at_root = torch.tensor([self.rank + 1.0])
        collective.reduce(at_root, 0, name)
        if self.rank == 0:
            collective.send(torch.tensor([7]), 1, name)
            received = torch.tensor([7])
        else:
            received = torch.tensor([0])
            collective.recv(received, 0, name)
        collective.barrier(name)
        try:
            collective.allreduce(torch.ones(2 + self.rank), name)
        except CollectiveMismatchError as error:
            mismatch = str(error)
        return [
            summed.tolist(),
            largest.item(),
            told.item(),
            [part.tolist() for part in gathered],
            scattered.item(),
            at_root.item() if self.rank == 0 else 3.0,
            received.item(),
            "(2,)" in mismatch and "(3,)" in mismatch,
        ]

    def with_a_communicator(self, membership: Membership, later: Membership) -> list[float]:
        """A group joined by membership: its communicator does what Ray's functions cannot."""
        communicator: Communicator = create_group(membership, device=CPU, timeout_s=30.0)
        tensor = torch.tensor([self.rank + 1.0])
        work = communicator.all_reduce(tensor, ReduceOp.MEAN)
        work.wait(10.0)
        collective.allreduce(tensor, membership.group)
        communicator = create_group(later, device=CPU, timeout_s=30.0)
        communicator.all_reduce(tensor, ReduceOp.SUM).wait()
        destroy_group(membership.group)
        destroy_group(membership.group)
        return tensor.tolist()

    def alone(self, name: str) -> str:
        """Wait for a peer that does not come."""
        register()
        with group_limits(device=CPU, timeout_s=0.2), pytest.raises(DeadlineExceededError) as caught:
            collective.init_collective_group(2, self.rank, backend=Backend(BACKEND), group_name=name)
        return str(caught.value)


@pytest.fixture(scope="module")
def members(ray_cluster: None, shared_actors: set[str]) -> Iterator[list[Any]]:
    before = live_actors()
    actors: list[Any] = [ray.remote(Member).options(num_cpus=0).remote(rank) for rank in range(2)]
    ray.get([actor.__ray_ready__.remote() for actor in actors], timeout=LIMIT_S)
    shared_actors |= live_actors() - before
    yield actors
    for actor in actors:
        ray.kill(actor)


@pytest.mark.ray
def test_rays_own_functions_on_a_group_of_the_members_and_on_one_that_the_driver_declares(members: list[Any]) -> None:
    register()
    name = f"test-{uuid.uuid4().hex}"
    check_everything(ray.get([member.with_rays_functions.remote(name, "gloo") for member in members], timeout=LIMIT_S))
    collective.create_collective_group(members, 2, [0, 1], backend=Backend(BACKEND), group_name=name)
    try:
        check_everything(ray.get([member.declared.remote(name) for member in members], timeout=LIMIT_S))
    finally:
        ray.get([member.leave.remote(name) for member in members], timeout=LIMIT_S)


def check_everything(results: list[list[Any]]) -> None:
    assert results[0] == [[3.0, 3.0, 3.0], 1, 1.0, [[0.0, 0.0], [1.0, 1.0]], 2.0, 3.0, 7, True]
    assert results[1] == [[3.0, 3.0, 3.0], 1, 1.0, [[0.0, 0.0], [1.0, 1.0]], 4.0, 3.0, 7, True]


@pytest.mark.ray
def test_a_group_by_membership(members: list[Any]) -> None:
    name = f"test-{uuid.uuid4().hex}"
    with RendezvousStore() as store:
        calls = [
            member.with_a_communicator.remote(
                store.membership(name, generation=0, rank=rank, world_size=2),
                store.membership(name, generation=1, rank=rank, world_size=2),
            )
            for rank, member in enumerate(members)
        ]
        assert ray.get(calls, timeout=LIMIT_S) == [[6.0], [6.0]]


@pytest.mark.ray
def test_a_group_that_was_not_formed_leaves_its_name_free(members: list[Any]) -> None:
    name = f"test-{uuid.uuid4().hex}"
    assert "rank 1 did not arrive" in ray.get(members[0].alone.remote(name), timeout=LIMIT_S)
    assert "0.2 s for rank 0" in ray.get(members[1].alone.remote(name), timeout=LIMIT_S)  # no old address is there
    check_everything(ray.get([member.with_rays_functions.remote(name, "auto") for member in members], timeout=LIMIT_S))


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


def test_messages_of_every_dtype_and_length_arrive_in_their_order_and_both_ways(ranks: list[PointToPoint]) -> None:
    sent = [torch.full((n,), float(n)) for n in (3, 100_000, 0, 2)]
    sent += [(torch.arange(6) % 2).reshape(2, 3).to(dtype).t() for dtype in DTYPES]
    received, answer = [torch.zeros_like(tensor) for tensor in sent], torch.zeros(1)

    def first() -> None:
        for tensor in sent:
            ranks[0].send(tensor, 1)
        ranks[0].recv(answer, 1)

    def second() -> None:
        for tensor in received:
            ranks[1].recv(tensor, 0)
        ranks[1].send(torch.tensor([9.0]), 0)

    assert begin_threads({0: first, 1: second})() == {0: None, 1: None}
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(received, sent, strict=True))
    assert answer.item() == 9.0


def test_another_shape_or_dtype_is_an_error_and_the_next_message_is_taken(ranks: list[PointToPoint]) -> None:
    wrong = [torch.zeros(3), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int32)]

    def send() -> None:
        for _ in wrong:
            ranks[0].send(torch.ones(2), 1)
        ranks[0].send(torch.full((2,), 5.0), 1)

    def receive() -> list[float]:
        for tensor in wrong:
            with pytest.raises(CollectiveMismatchError, match=r"on rank 1 for torch.float32 \(2,\) from rank 0"):
                ranks[1].recv(tensor, 0)
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


def test_a_rank_that_cannot_be_is_refused(ranks: list[PointToPoint]) -> None:
    for start, other in itertools.product((ranks[1].send, ranks[1].recv), (1, 3, -1)):
        with pytest.raises(InvalidArgumentError, match=f"another rank of group 'g', 0 to 2, got {other} on rank 1"):
            start(torch.ones(1), other)
