"""Ranks that are said to be on several hosts, as threads of the test's process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from raydist.collectives.base import Communicator, Membership
from raydist.collectives.hierarchical import HierarchicalBackend
from raydist.collectives.rendezvous import RendezvousStore
from tests.collectives.threads import ThreadTeam

T = TypeVar("T")

SHAPES = ("ab", "aabb", "abaa", "abc", "aabbbcc")
"""One letter a rank: its host. One rank each, as many each, fewer here than there, three hosts, three uneven ones."""


def hosted(membership: Membership, timeout_s: float) -> Communicator:
    return HierarchicalBackend().open(membership, torch.device("cpu"), timeout_s)


@contextlib.contextmanager
def hosted_team(hosts: str, timeout_s: float = 20.0) -> Iterator[ThreadTeam]:
    """A team of threads, of which those of one letter share memory."""
    with RendezvousStore() as store:
        team = ThreadTeam(len(hosts), timeout_s, hosted, store, tuple(hosts))
        try:
            yield team
        finally:
            team.close()


def run_hosted(hosts: str, body: Callable[[Any], T]) -> list[T]:
    """Run `body` on every rank of a new group: the results in rank order, or the first rank's error."""
    with hosted_team(hosts) as team:
        return team.run(body)
