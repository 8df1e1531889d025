"""Ranks that wait for each other in different calls are found and named."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raydist.collectives.base import Membership
from raydist.collectives.deadlock import DeadlockDetector, Progress, RankStatus, WatchedCommunicator, diagnose
from raydist.collectives.opening import open_communicator
from raydist.collectives.rendezvous import RendezvousStore
from raydist.core.errors import CancelledError, CollectiveMismatchError
from raydist.core.values import ReduceOp
from tests.collectives.threads import begin_threads

pytestmark = pytest.mark.timeout(60)

# --- status -----------------------------------------------------------------------------------------------------------


def test_what_a_rank_does_can_be_seen_and_read() -> None:
    progress = Progress()
    assert str(progress.look()) == "has run no step yet"
    progress.begin_step(4)
    assert str(progress.look()) == "is at work in step 4"
    number = progress.call("values")
    progress.wait("values", number, "all_reduce(SUM)", torch.ones(2, dtype=torch.float64))
    assert str(progress.look()) == "waits in all_reduce(SUM) of torch.float64 (2,) (values, call 0) in step 4"
    progress.go_on()
    progress.end_step()
    assert str(progress.look()) == "has ended step 4"


def test_every_move_changes_the_number_of_events_and_a_look_does_not() -> None:
    progress = Progress()
    seen = [progress.look()]
    for move in (
        lambda: progress.begin_step(0),
        lambda: progress.call("g"),
        lambda: progress.wait("g", 0, "barrier", None),
        progress.go_on,
        progress.end_step,
        progress.restart,
    ):
        move()
        seen.append(progress.look())
    assert len({status.events for status in seen}) == len(seen)
    assert progress.look().events == seen[-1].events
    assert [status.look for status in seen] == list(range(1, len(seen) + 1))


# --- who waits for whom, also by a model: small programs of ranks that run until none can go on -----------------------


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


def test_a_rank_that_has_left_is_waited_for_in_vain() -> None:
    assert verdict(waits("g", 1), ended(3, g=1)) is not None
    assert verdict(waits("g", 1), ended(4, g=1)) is not None
    assert verdict(waits("g", 1), works(4, g=1)) is not None
    assert verdict(waits("g", 1), waits("g", 1), ended(3, g=1)) is not None


def test_a_rank_that_may_still_come_is_waited_for() -> None:
    assert verdict(waits("g", 1), works(3, g=1)) is None
    assert verdict(waits("g", 1), ended(2, g=1)) is None  # its next step has not begun yet
    assert verdict(waits("g", 1), works(2, g=1)) is None
    assert verdict(waits("g", 1), waits("g", 1), works(3, g=1)) is None


def test_who_is_there_is_not_waited_for() -> None:
    assert verdict(waits("g", 1), ended(3, g=2)) is None  # its data are on their way
    assert verdict(waits("g", 1), waits("g", 1)) is None


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


class Ranks:
    """Ranks that call collectives of two groups, each in its own order, until none can go on."""

    def __init__(self, programs: list[list[str]]) -> None:
        self._programs = programs
        self._called: list[list[str]] = [[] for _ in programs]
        while any(self._go_on(rank) for rank in range(len(programs))):
            pass

    def _go_on(self, rank: int) -> bool:
        if self.waits(rank) or len(self._called[rank]) == len(self._programs[rank]):
            return False
        self._called[rank].append(self._programs[rank][len(self._called[rank])])
        return True

    def waits(self, rank: int) -> bool:
        """Whether the last collective that it called is not called by all yet."""
        mine = self._called[rank]
        return bool(mine) and any(theirs.count(mine[-1]) < mine.count(mine[-1]) for theirs in self._called)

    def status(self, rank: int) -> RankStatus:
        mine = self._called[rank]
        calls = {group: mine.count(group) for group in "ab"}
        return waits(mine[-1], calls[mine[-1]] - 1, calls=calls) if self.waits(rank) else ended(**calls)


@given(st.lists(st.lists(st.sampled_from("ab"), max_size=4), min_size=2, max_size=4))
def test_every_program_ends_or_is_found_out(programs: list[list[str]]) -> None:
    ranks = Ranks(programs)
    stuck = any(ranks.waits(rank) for rank in range(len(programs)))
    assert (verdict(*(ranks.status(rank) for rank in range(len(programs)))) is not None) == stuck


# --- watched ----------------------------------------------------------------------------------------------------------


def no_verdict() -> None:
    return None


class Held:
    """A group whose collectives end as told; notes how its rank was seen while it waited."""

    device = torch.device("cpu")
    membership = Membership("g", 0, 0, 1)
    timeout_s = 1.0
    checks_itself = host_runs_ahead = False

    def __init__(self, progress: Progress, error: Exception | None = None) -> None:
        self._progress = progress
        self._error = error
        self.seen: list[RankStatus] = []

    def announce(self, what: str) -> None:
        """It shows nothing."""

    def wait(self, timeout_s: float | None = None) -> None:
        self.seen.append(self._progress.look())
        if self._error is not None:
            raise self._error

    def begin(self, *arguments: object) -> Held:
        return self

    def exchange_on_host(self, data: bytes, what: str) -> list[bytes]:
        self.wait()
        return [data]

    all_reduce = all_gather = broadcast = begin


def watched(held: Any, name: str, progress: Progress, verdict: Any = no_verdict) -> WatchedCommunicator:
    return WatchedCommunicator(held, name, progress, verdict)


def test_a_wait_can_be_seen() -> None:
    progress = Progress()
    held = Held(progress)
    group = watched(held, "gradients", progress)
    tensor = torch.ones(2, 3)
    group.barrier()
    group.all_reduce(tensor, ReduceOp.SUM).wait()
    group.announce("all_reduce(MAX) of a number")
    group.all_gather([tensor], tensor).wait()
    group.all_gather([tensor], tensor).wait()
    group.broadcast(tensor, 0).wait()
    form = " of torch.float32 (2, 3)"
    assert [status.doing for status in held.seen] == [
        "barrier",
        f"all_reduce(SUM){form}",
        "all_reduce(MAX) of a number",
        f"all_gather{form}",
        f"broadcast(root=0){form}",
    ]
    assert [(status.waits_in, status.number) for status in held.seen] == [("gradients", place) for place in range(5)]
    assert held.seen[-1].calls == {"gradients": 5}
    assert progress.look().waits_in == ""


def test_the_verdict_replaces_what_came_of_it() -> None:
    progress = Progress()
    verdict = CollectiveMismatchError("rank 1 has left")
    group = watched(Held(progress, CancelledError("aborted")), "values", progress, lambda: verdict)
    with pytest.raises(CollectiveMismatchError, match="rank 1 has left"):
        group.barrier()
    assert progress.look().waits_in == ""
    group = watched(Held(progress, CancelledError("aborted")), "values", progress)
    with pytest.raises(CancelledError, match="aborted"):
        group.barrier()


# --- detector ---------------------------------------------------------------------------------------------------------


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
