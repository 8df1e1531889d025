from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from raydist.collectives.base import Communicator, Membership
from raydist.collectives.process_group import Generation, ProcessGroupBackend, RawGroup, RawWork
from raydist.collectives.rendezvous import RendezvousStore
from raydist.core.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from tests.collectives.threads import begin_threads


class ManualWork:
    """Lands when the test says so."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: RuntimeError | None = None

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self, limit: timedelta | None = None) -> None:
        if not self.done.wait(None if limit is None else limit.total_seconds()):
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise self.error


class ManualBackend(ProcessGroupBackend):
    """Hands out what `call` returns as the work."""

    def __init__(self) -> None:
        self.killed = 0

    def open(self, membership: Membership, device: torch.device, timeout_s: float) -> Communicator:
        raise NotImplementedError

    def create(self, store: Store, membership: Membership, timeout_s: float) -> RawGroup:
        return object()

    def kill(self, group: RawGroup) -> None:
        self.killed += 1


@pytest.fixture
def generation() -> Iterator[Generation]:
    with RendezvousStore() as store:
        membership = store.membership("g", generation=0, rank=0, world_size=1)
        yield Generation.join(membership, ManualBackend(), timeout_s=0.2)


def begin(generation: Generation, work: ManualWork) -> RawWork:
    return generation.submit("barrier", lambda _: work)


def test_a_failure_is_reported_and_stays(generation: Generation) -> None:
    work, later = ManualWork(), ManualWork()
    work.error = RuntimeError("Connection closed by peer")
    work.done.set()
    begin(generation, work)
    with pytest.raises(UnavailableError, match="Connection closed by peer"):
        generation.wait(work, "barrier", None)
    with pytest.raises(UnavailableError, match=r"given up: .*Connection closed by peer.*Open the group anew"):
        begin(generation, later)


def test_a_limit_of_ones_own_does_not_fail_the_group(generation: Generation) -> None:
    work = ManualWork()
    begin(generation, work)
    with pytest.raises(DeadlineExceededError, match="It goes on"):
        generation.wait(work, "barrier", 0.01)
    work.done.set()
    generation.wait(work, "barrier", 0.01)


def test_the_groups_limit_does(generation: Generation) -> None:
    work = ManualWork()
    begin(generation, work)
    with pytest.raises(DeadlineExceededError, match=r"timed out after 0\.2 s"):
        generation.wait(work, "barrier", None)
    with pytest.raises(DeadlineExceededError, match="given up"):
        begin(generation, ManualWork())


def test_a_landed_work_counts_even_after_an_abort(generation: Generation) -> None:
    work, pending = ManualWork(), ManualWork()
    begin(generation, work)
    work.done.set()
    generation.abort()
    generation.wait(work, "barrier", None)
    with pytest.raises(CancelledError, match="rank 0 aborted group 'g', generation 0"):
        generation.wait(pending, "barrier", None)


def test_refused_arguments_do_not_fail_the_group(generation: Generation) -> None:
    def refuse(group: RawGroup) -> dist.Work:
        raise RuntimeError("Invalid scalar type")

    with pytest.raises(InvalidArgumentError, match="barrier by rank 0 of 1"):
        generation.submit("barrier", refuse)
    begin(generation, ManualWork())


def test_a_left_group_is_closed(generation: Generation) -> None:
    generation.leave()
    generation.leave()
    with pytest.raises(FailedPreconditionError, match="closed"):
        begin(generation, ManualWork())


class DeviceBackend(ManualBackend):
    """As of a GPU: waiting for work does not block the host."""

    host_runs_ahead = True


@pytest.fixture
def on_device() -> Iterator[tuple[Generation, DeviceBackend]]:
    with RendezvousStore() as store:
        backend = DeviceBackend()
        membership = store.membership("g", generation=0, rank=0, world_size=1)
        generation = Generation.join(membership, backend, timeout_s=0.5)
        yield generation, backend
        generation.leave()


class DeviceWork(ManualWork):
    """Fails the test where anything but the watchdog asks whether it has landed."""

    waits = 0

    def is_completed(self) -> bool:
        assert threading.current_thread() is not threading.main_thread()
        return super().is_completed()

    def wait(self, limit: timedelta | None = None) -> None:
        assert limit is None, "with a limit torch blocks the host"
        self.waits += 1


def test_the_host_does_not_wait_for_a_device(on_device: tuple[Generation, DeviceBackend]) -> None:
    generation, _ = on_device
    works = [DeviceWork() for _ in range(3)]
    for work in works:
        begin(generation, work)
        generation.wait(work, "all_reduce", None)
    assert [work.waits for work in works] == [1] * 3


def test_a_watchdog_ends_a_group_whose_collective_hangs(on_device: tuple[Generation, DeviceBackend]) -> None:
    generation, backend = on_device
    done, hangs = DeviceWork(), DeviceWork()
    begin(generation, done)
    done.done.set()
    begin(generation, hangs)
    deadline = time.monotonic() + 10
    while not backend.killed and time.monotonic() < deadline:
        time.sleep(0.02)
    assert backend.killed == 1
    with pytest.raises(DeadlineExceededError, match=r"barrier by rank 0 .* given up: .*timed out after 0\.5 s"):
        generation.wait(hangs, "barrier", None)
    with pytest.raises(DeadlineExceededError, match="given up"):
        begin(generation, DeviceWork())


def test_data_is_exchanged_through_the_store() -> None:
    with RendezvousStore() as store:
        members = [store.membership("g", generation=0, rank=rank, world_size=2) for rank in range(2)]
        joins = {
            rank: functools.partial(Generation.join, member, DeviceBackend(), 2.0)
            for rank, member in enumerate(members)
        }
        ranks: list[Generation] = [joined for _, joined in sorted(begin_threads(joins)().items())]
        for number in range(5):
            told = begin_threads(
                {
                    rank: functools.partial(generation.exchange_on_host, b"x" * number * rank, "a test")
                    for rank, generation in enumerate(ranks)
                }
            )()
            assert told == {0: [b"", b"x" * number], 1: [b"", b"x" * number]}
        with pytest.raises(DeadlineExceededError, match=r"a test by rank 0 of 2 .*rank 1 did not arrive"):
            ranks[0].exchange_on_host(b"", "a test")
        for generation in ranks:
            generation.leave()
