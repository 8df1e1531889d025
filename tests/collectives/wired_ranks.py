"""Ranks of this process that are connected by wires."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from raydist.collectives.base import Membership
from raydist.collectives.rendezvous.store import RendezvousStore, connect_store
from raydist.collectives.wires.wires import Wires
from tests.collectives.threads import begin_threads


def nothing() -> None:
    """Neither a reason to give up, nor anybody to wake."""


def await_true(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class WiredRank:
    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self.rank = membership.rank
        self.wires = Wires(membership, 10.0)
        self.store = connect_store(membership, 10.0)
        self.woken = threading.Event()

    def start(self) -> None:
        others = [rank for rank in range(self.membership.world_size) if rank != self.rank]
        self.wires.start(self.store, others, settled=self.woken.set, check=nothing)


@contextlib.contextmanager
def wired_ranks(*hosts: str) -> Iterator[list[WiredRank]]:
    """One rank on each of these hosts; without any, three that do not know theirs."""
    size = len(hosts) or 3
    with RendezvousStore() as store:
        members = [store.membership("g", generation=0, rank=rank, world_size=size, hosts=hosts) for rank in range(size)]
        ranks = [WiredRank(member) for member in members]
        assert set(begin_threads({rank.rank: rank.start for rank in ranks})().values()) == {None}
        yield ranks
        for rank in ranks:
            rank.wires.close()
            rank.wires.close()
