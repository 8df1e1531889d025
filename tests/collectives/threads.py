"""Ranks as threads of the test's process."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from raydist.collectives.base import Backend, Communicator, Membership
from raydist.collectives.hierarchical import HierarchicalBackend
from raydist.collectives.rendezvous import RendezvousStore
from raydist.collectives.shared_memory.communicator import SharedMemoryBackend
from tests.collectives.local_group import LocalGroup, LocalHub
from tests.contracts.communicator import Body, Team

T = TypeVar("T")

Make = Callable[[Membership, float], Communicator]
"""Joins a group."""

TIMEOUT_S = 20.0


def run_ranks(world_size: int, body: Callable[[LocalGroup], T], *, timeout_s: float = TIMEOUT_S) -> list[T]:
    """Run `body` on every rank of a new group: the results in rank order, or the first rank's error."""
    hub = LocalHub()
    groups = [LocalGroup(hub, Membership("test", 0, rank, world_size), timeout_s) for rank in range(world_size)]

    def rank_main(group: LocalGroup) -> T:
        try:
            return body(group.start())
        except BaseException:
            group.abort()
            raise

    results = begin_threads({group.rank: functools.partial(rank_main, group) for group in groups})()
    for rank in range(world_size):
        if isinstance(results[rank], BaseException):
            raise results[rank]
    return [results[rank] for rank in range(world_size)]


def begin_threads(bodies: Mapping[int, Callable[[], Any]]) -> Callable[[], dict[int, Any]]:
    """Start a thread per body; the returned function waits for results, errors included as values."""
    outcomes: dict[int, Any] = {}

    def main(rank: int) -> None:
        try:
            outcomes[rank] = bodies[rank]()
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in bodies]
    for thread in threads:
        thread.start()

    def collect() -> dict[int, Any]:
        for thread in threads:
            thread.join(50)
            assert not thread.is_alive(), "a rank hangs"
        return outcomes

    return collect


class ThreadTeam(Team):
    """A team of threads; those of a `LocalHub` where nobody says how a rank's group is made."""

    def __init__(
        self,
        world_size: int,
        timeout_s: float,
        make: Make | None = None,
        store: RendezvousStore | None = None,
        hosts: tuple[str, ...] = (),
    ) -> None:
        hub = LocalHub()
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._make: Make = make or (lambda membership, timeout_s: LocalGroup(hub, membership, timeout_s).start())
        self._address = ("", 0) if store is None else (store.host, store.port)
        self._hosts = hosts
        self._generation = 0
        self._groups: dict[int, Communicator] = {}
        self._join()

    def begin(self, bodies: Mapping[int, Body]) -> Callable[[], dict[int, Any]]:
        return begin_threads({rank: functools.partial(body, self._groups[rank]) for rank, body in bodies.items()})

    def kill(self, rank: int) -> None:
        self._groups.pop(rank).close()

    def close(self) -> None:
        """End all ranks."""
        for group in self._groups.values():
            group.close()

    def reform(self) -> None:
        self._generation += 1
        for group in self._groups.values():
            group.abort()
            group.close()
        self._join()

    def _membership(self, rank: int) -> Membership:
        return Membership("team", self._generation, rank, self.world_size, *self._address, self._hosts)

    def _join(self) -> None:
        joins = {
            rank: functools.partial(self._make, self._membership(rank), self.timeout_s)
            for rank in range(self.world_size)
        }
        self._groups = begin_threads(joins)()
        assert not [group for group in self._groups.values() if isinstance(group, BaseException)], self._groups


@contextlib.contextmanager
def team_on(backend: Backend, world_size: int, hosts: str = "") -> Iterator[ThreadTeam]:
    """A team of threads with a backend between them. `hosts` has one letter a rank: its host."""

    def make(membership: Membership, limit_s: float) -> Communicator:
        return backend.open(membership, torch.device("cpu"), limit_s)

    with RendezvousStore() as store:
        team = ThreadTeam(world_size, TIMEOUT_S, make, store, tuple(hosts))
        try:
            yield team
        finally:
            team.close()


def run_sharing(world_size: int, body: Callable[[Any], T]) -> list[T]:
    """Run `body` on ranks that share memory: the results in rank order, or the first rank's error."""
    with team_on(SharedMemoryBackend(), world_size) as team:
        return team.run(body)


def run_hosted(hosts: str, body: Callable[[Any], T]) -> list[T]:
    """Run `body` on ranks of several hosts: the results in rank order, or the first rank's error."""
    with team_on(HierarchicalBackend(), len(hosts), hosts) as team:
        return team.run(body)
