from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from typing import Any
from unittest import mock

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
    create_group,
    destroy_group,
    group_limits,
    register,
)
from raydist.collectives.rendezvous import RendezvousStore
from raydist.errors import CollectiveMismatchError, DeadlineExceededError, UnavailableError
from raydist.values import ReduceOp
from tests.conftest import live_actors

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

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

    def without_shared_memory(self, name: str) -> str:
        """Joining where rank 0 finds no room."""
        register()
        with (
            group_limits(device=CPU, timeout_s=30.0, backend="shm"),
            mock.patch.object(os, "posix_fallocate", side_effect=OSError(errno.ENOSPC, "No space left on device")),
            pytest.raises(UnavailableError) as caught,
        ):
            collective.init_collective_group(2, self.rank, backend=Backend(BACKEND), group_name=name)
        return str(caught.value)

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


@pytest.mark.parametrize("backend", ["auto", "shm", "gloo"])
def test_rays_own_functions(members: list[Any], backend: str) -> None:
    name = f"test-{uuid.uuid4().hex}"
    results = ray.get([member.with_rays_functions.remote(name, backend) for member in members], timeout=LIMIT_S)
    check_everything(results)


def test_a_group_that_the_driver_declares(members: list[Any]) -> None:
    register()
    name = f"test-{uuid.uuid4().hex}"
    collective.create_collective_group(members, 2, [0, 1], backend=Backend(BACKEND), group_name=name)
    try:
        check_everything(ray.get([member.declared.remote(name) for member in members], timeout=LIMIT_S))
    finally:
        ray.get([member.leave.remote(name) for member in members], timeout=LIMIT_S)


def test_shared_memory_that_is_not_there(members: list[Any]) -> None:
    name = f"test-{uuid.uuid4().hex}"
    for message in ray.get([member.without_shared_memory.remote(name) for member in members], timeout=LIMIT_S):
        assert "'shm' cannot carry group" in message
        assert "rank 0: no shared memory: No space left on device" in message


def check_everything(results: list[list[Any]]) -> None:
    assert results[0] == [[3.0, 3.0, 3.0], 1, 1.0, [[0.0, 0.0], [1.0, 1.0]], 2.0, 3.0, 7, True]
    assert results[1] == [[3.0, 3.0, 3.0], 1, 1.0, [[0.0, 0.0], [1.0, 1.0]], 4.0, 3.0, 7, True]


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


def test_a_rank_that_stays_away(members: list[Any]) -> None:
    message = ray.get(members[1].alone.remote(f"test-{uuid.uuid4().hex}"), timeout=LIMIT_S)
    assert "0.2 s for rank 0" in message


def test_a_group_that_was_not_formed_leaves_its_name_free(members: list[Any]) -> None:
    name = f"test-{uuid.uuid4().hex}"
    assert "rank 1 did not arrive" in ray.get(members[0].alone.remote(name), timeout=LIMIT_S)
    assert "0.2 s for rank 0" in ray.get(members[1].alone.remote(name), timeout=LIMIT_S)  # no old address is there
    check_everything(ray.get([member.with_rays_functions.remote(name, "auto") for member in members], timeout=LIMIT_S))


def test_register_twice() -> None:
    register()
    register()
    assert collective.is_backend_available(BACKEND)
