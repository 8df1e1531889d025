from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from raydist.collectives.deadlock import DeadlockDetector, Progress, WatchedCommunicator
from raydist.collectives.opening import open_communicator
from raydist.collectives.rendezvous import RendezvousStore
from raydist.errors import CollectiveMismatchError
from raydist.values import ReduceOp
from tests.collectives.threads import begin_threads

pytestmark = pytest.mark.timeout(60)


class Rank:
    """A rank that does what it is told, and its detector."""

    def __init__(self, store: RendezvousStore, rank: int, world_size: int) -> None:
        self.progress = Progress()
        self.ended = threading.Event()
        self.membership = store.membership("g", generation=0, rank=rank, world_size=world_size)
        self.end: Callable[[], None] = self.ended.set
        self.detector = DeadlockDetector(self.membership, self.progress, lambda: self.end())

    def wait_in(self, group: str) -> None:
        self.progress.wait(group, self.progress.call(group), "all_reduce(SUM)", torch.ones(1))


@contextlib.contextmanager
def ranks(world_size: int) -> Iterator[list[Rank]]:
    with RendezvousStore() as store:
        made = [Rank(store, rank, world_size) for rank in range(world_size)]
        try:
            for rank in made:
                rank.progress.begin_step(0)
                rank.detector.start()
            yield made
        finally:
            for rank in made:
                rank.detector.close()
                rank.detector.close()


def test_one_that_has_left_ends_the_wait_of_the_others() -> None:
    with ranks(3) as (first, second, third):
        first.wait_in("g")
        second.wait_in("g")
        third.progress.end_step()
        assert first.ended.wait(20) or second.ended.wait(20)
        for rank in (first, second, third):
            verdict = rank.detector.verdict()
            assert verdict is not None
            assert "rank 2 has ended step 0; rank 2 differs from the others" in str(verdict)


def test_two_that_wait_in_different_collectives() -> None:
    with ranks(2) as (first, second):
        first.wait_in("gradients")
        second.wait_in("values")
        assert first.ended.wait(20) or second.ended.wait(20)


def test_one_that_works_is_waited_for() -> None:
    with ranks(2) as (first, second):
        first.wait_in("g")
        time.sleep(2.5)  # five looks
        assert not first.ended.is_set()
        assert first.detector.verdict() is None
        second.progress.end_step()
        assert first.ended.wait(20)


def test_ranks_that_go_on_are_left_alone() -> None:
    with ranks(2) as both:
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            for rank in both:
                rank.wait_in("g")
                time.sleep(0.01)
                rank.progress.go_on()
        assert not any(rank.ended.is_set() for rank in both)


def test_one_that_comes_through_collectives_publishes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks(2) as (first, _):
        first.detector.close()  # looks are taken by hand
        published: list[int] = []
        first.detector._look()
        monkeypatch.setattr(first.detector, "_publish", lambda store: published.append(1))
        first.detector._look()
        assert published == [1]
        first.wait_in("g")
        first.progress.go_on()
        first.detector._look()
        assert published == [1]
        first.detector._look()  # and has come through none since
        assert published == [1, 1]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_the_wait_ends_with_the_verdict_on_the_wires_that_there_are(backend: str) -> None:
    with ranks(2) as (first, second):
        groups: dict[int, WatchedCommunicator] = {}

        def join(rank: int, it: Rank) -> None:
            inner = open_communicator(it.membership, device=torch.device("cpu"), timeout_s=40.0, backend=backend)
            groups[rank] = WatchedCommunicator(inner, "values", it.progress, it.detector.verdict)

        assert begin_threads({0: lambda: join(0, first), 1: lambda: join(1, second)})() == {0: None, 1: None}
        for rank in (first, second):
            rank.end = groups[rank.membership.rank].abort
        second.progress.end_step()
        with pytest.raises(CollectiveMismatchError, match="rank 1 has ended step 0"):
            groups[0].all_reduce(torch.ones(1), ReduceOp.SUM).wait()
        for group in groups.values():
            group.close()


def test_a_store_that_is_gone_ends_the_looking_quietly() -> None:
    with ranks(2) as (first, second):
        first.wait_in("g")
        store = first.detector._store
        assert store is not None
        first.detector._store = second.detector._store = None
        time.sleep(1.2)
        assert not first.ended.is_set()
        assert first.detector.verdict() is None


def test_ranks_that_wait_for_the_first_are_left_alone_until_it_has_left() -> None:
    with ranks(6) as team:
        for rank in team[1:]:
            rank.wait_in("g")
        time.sleep(2.5)
        assert not any(rank.ended.is_set() for rank in team)
        team[0].progress.end_step()
        assert team[0].ended.wait(20)
