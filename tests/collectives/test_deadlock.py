"""Ranks that wait for each other in different calls are found and named."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from raydist.collectives.deadlock import DeadlockDetector, Progress, RankStatus, WatchedCommunicator, diagnose
from raydist.collectives.opening import open_communicator
from raydist.collectives.rendezvous import RendezvousStore
from raydist.core.errors import CollectiveMismatchError
from raydist.core.values import ReduceOp
from tests.collectives.threads import begin_threads

pytestmark = pytest.mark.timeout(60)


def waits(group: str, number: int, *, step: int = 3, calls: dict[str, int] | None = None) -> RankStatus:
    counted = {group: number + 1} | (calls or {})
    return RankStatus(7, step, True, counted, group, number, "all_reduce", 1)


def works(step: int = 3, **calls: int) -> RankStatus:
    return RankStatus(7, step, True, calls, look=1)


def ended(step: int = 3, **calls: int) -> RankStatus:
    return RankStatus(7, step, False, calls, look=1)


def verdict(*statuses: RankStatus) -> str | None:
    """Two looks between which nobody moved."""
    return diagnose(dict(enumerate(statuses)), {rank: replace(it, look=2) for rank, it in enumerate(statuses)})


def test_only_a_rank_that_cannot_come_any_more_is_waited_for_in_vain() -> None:
    in_vain = [
        (waits("g", 1), ended(3, g=1)),
        (waits("g", 1), ended(4, g=1)),
        (waits("g", 1), works(4, g=1)),
        (waits("g", 1), waits("g", 1), ended(3, g=1)),
        (waits("a", 0), waits("b", 0)),  # for each other
        (waits("a", 0), waits("b", 0), waits("a", 0)),
    ]
    for statuses in in_vain:
        assert verdict(*statuses) is not None, statuses
    may_come = [
        (waits("g", 1), works(3, g=1)),
        (waits("g", 1), ended(2, g=1)),  # its next step has not begun yet
        (waits("g", 1), works(2, g=1)),
        (waits("g", 1), waits("g", 1), works(3, g=1)),
        (waits("g", 1), ended(3, g=2)),  # its data are on their way
        (waits("g", 1), waits("g", 1)),
    ]
    for statuses in may_come:
        assert verdict(*statuses) is None, statuses


def test_nobody_is_judged_by_one_look_or_by_an_old_one() -> None:
    now = {0: waits("g", 1), 1: ended(3, g=1)}
    later = {rank: replace(status, look=2) for rank, status in now.items()}
    assert diagnose({}, now) is None
    assert diagnose(now, later) is not None
    assert diagnose(now, {**later, 1: now[1]}) is None  # it did not answer again
    assert diagnose(now, {**later, 1: replace(later[1], events=8)}) is None  # it has moved
    assert diagnose(now, {0: later[0]}) is None


def test_the_one_that_differs_is_named() -> None:
    said = verdict(waits("g", 1), ended(3, g=1), waits("g", 1))
    assert said is not None
    assert said.startswith("rank 0 waits in all_reduce (g, call 1) in step 3; rank 1 has ended step 3; ")
    assert said.endswith("; rank 1 differs from the others")
    both = verdict(waits("g", 1), ended(3, g=1))
    assert both is not None
    assert "differ" not in both


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


@pytest.fixture(autouse=True)
def _looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydist.collectives.deadlock._LOOK_S", 0.1)


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


def test_ranks_that_go_on_are_left_alone() -> None:
    with ranks(2) as both:
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            for rank in both:
                rank.wait_in("g")
                time.sleep(0.01)
                rank.progress.go_on()
        assert not any(rank.ended.is_set() for rank in both)


def test_the_wait_ends_with_the_verdict_also_where_the_group_is_in_a_collective() -> None:
    with ranks(2) as (first, second):
        groups: dict[int, WatchedCommunicator] = {}

        def join(rank: int, it: Rank) -> None:
            inner = open_communicator(it.membership, device=torch.device("cpu"), timeout_s=40.0)
            groups[rank] = WatchedCommunicator(inner, "values", it.progress, it.detector.verdict)

        assert begin_threads({0: lambda: join(0, first), 1: lambda: join(1, second)})() == {0: None, 1: None}
        for rank in (first, second):
            rank.end = groups[rank.membership.rank].abort
        second.progress.end_step()
        said = r"rank 0 waits in all_reduce\(SUM\) of torch.float32 \(1,\) \(values, call 0\) in step 0; rank 1 has"
        with pytest.raises(CollectiveMismatchError, match=said):
            groups[0].all_reduce(torch.ones(1), ReduceOp.SUM).wait()
        for group in groups.values():
            group.close()
