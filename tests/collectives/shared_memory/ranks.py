"""Ranks that share memory, as threads of the test's process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from raydist.collectives.base import Communicator, Membership
from raydist.collectives.rendezvous import RendezvousStore
from raydist.collectives.shared_memory.communicator import SharedMemoryBackend
from tests.collectives.threads import ThreadTeam

T = TypeVar("T")

CPU = torch.device("cpu")


@contextlib.contextmanager
def sharing_team(world_size: int, timeout_s: float = 20.0) -> Iterator[ThreadTeam]:
    """A team of threads that meet in shared memory."""

    def make(membership: Membership, limit_s: float) -> Communicator:
        return SharedMemoryBackend().open(membership, CPU, limit_s)

    with RendezvousStore() as store:
        team = ThreadTeam(world_size, timeout_s, make, store)
        try:
            yield team
        finally:
            team.close()


def run_sharing(world_size: int, body: Callable[[Any], T], *, timeout_s: float = 20.0) -> list[T]:
    """Run `body` on every rank of a new group: the results in rank order, or the first rank's error."""
    with sharing_team(world_size, timeout_s) as team:
        return team.run(body)
