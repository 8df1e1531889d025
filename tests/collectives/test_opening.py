from __future__ import annotations

import errno
import functools
import logging
import os
import time
from collections.abc import Callable

import pytest
import torch

from raydist.collectives.base import Backend, Communicator, JoiningCommunicator, Membership
from raydist.collectives.hierarchical import HierarchicalBackend
from raydist.collectives.opening import ChoosingCommunicator, backends_for, open_communicator
from raydist.collectives.process_group import GlooBackend
from raydist.collectives.rendezvous import RendezvousStore
from raydist.collectives.shared_memory.communicator import SharedMemoryBackend
from raydist.errors import CancelledError, FailedPreconditionError, UnavailableError
from raydist.values import ReduceOp
from tests.collectives.threads import begin_threads
from tests.contracts import communicator as contract

pytestmark = pytest.mark.timeout(120)

CPU = torch.device("cpu")


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """`/dev/shm` is full."""

    def refuse(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)


@pytest.fixture
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has not said yet what carries its groups."""
    monkeypatch.setattr("raydist.collectives.opening._told", set())


def on_two_ranks(body: Callable[[Communicator, Callable[[int], Membership]], object], backend: str = "auto") -> object:
    """What `body` gives on both ranks; it is also given the memberships of later generations."""

    def main(rank: int) -> object:
        def membership(generation: int) -> Membership:
            return store.membership("g", generation=generation, rank=rank, world_size=2)

        communicator = open_communicator(membership(0), device=CPU, timeout_s=20.0, backend=backend)
        try:
            return body(communicator, membership)
        finally:
            communicator.close()

    with RendezvousStore() as store:
        outcomes = begin_threads({rank: functools.partial(main, rank) for rank in range(2)})()
    for outcome in outcomes.values():
        if isinstance(outcome, BaseException):
            raise outcome
    assert outcomes[0] == outcomes[1]
    return outcomes[0]


def sum_and_kind(communicator: Communicator) -> tuple[float, bool]:
    return contract.sum_of_ones(communicator), communicator.checks_itself


def test_ranks_of_one_host_share_memory_by_themselves(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "raydist"):
        assert on_two_ranks(lambda communicator, _: sum_and_kind(communicator)) == (2.0, True)
    assert caplog.messages == []


@pytest.mark.usefixtures("no_room", "nothing_told")
def test_without_room_gloo_carries_the_group_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "raydist"):
        for _ in range(2):  # a strategy opens two groups, and each again after an error
            assert on_two_ranks(lambda communicator, _: sum_and_kind(communicator)) == (2.0, False)
    assert caplog.messages == [
        "group 'g', generation 0 is carried by gloo, not shm: rank 0: no shared memory: No space left on device."
    ]


@pytest.mark.usefixtures("no_room")
def test_without_room_shared_memory_by_name_is_an_error() -> None:
    with pytest.raises(UnavailableError, match=r"'shm' cannot carry group 'g'.* No space left .* Use the backend"):
        on_two_ranks(lambda communicator, _: None, backend="shm")


def test_gloo_by_name() -> None:
    assert on_two_ranks(lambda communicator, _: sum_and_kind(communicator), backend="gloo") == (2.0, False)


def test_every_generation_chooses_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    fallocate = os.posix_fallocate

    def room_for_even_ones(descriptor: int, offset: int, length: int) -> None:
        if generation[0] % 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(descriptor, offset, length)

    generation = [0]
    monkeypatch.setattr(os, "posix_fallocate", room_for_even_ones)

    def body(communicator: Communicator, membership: Callable[[int], Membership]) -> list[tuple[float, bool]]:
        results = [sum_and_kind(communicator)]
        for number in (1, 2):
            communicator.barrier()
            generation[0] = number
            communicator.reconfigure(membership(number))
            results.append(sum_and_kind(communicator))
        with pytest.raises(FailedPreconditionError, match="later than 2, got 1"):
            communicator.reconfigure(membership(1))
        return results

    assert on_two_ranks(body) == [(2.0, True), (2.0, False), (2.0, True)]


@pytest.mark.usefixtures("no_room")
def test_memory_that_cannot_be_shared_is_private(caplog: pytest.LogCaptureFixture) -> None:
    def body(communicator: Communicator, _: object) -> object:
        return contract.sums_of_allocated(communicator)

    expected = on_two_ranks(body, backend="gloo")
    assert expected == on_two_ranks(body)


def test_the_whole_of_a_communicator_is_passed_on() -> None:
    def body(communicator: Communicator, _: object) -> object:
        return [repr(contract.reduce_everything(communicator)[0][0]), len(contract.move_everything(communicator))]

    assert on_two_ranks(body) == on_two_ranks(body, backend="gloo")


def test_it_can_be_aborted_before_it_has_joined() -> None:
    with RendezvousStore() as store:
        membership = store.membership("g", generation=0, rank=0, world_size=2)
        backends: tuple[Backend, ...] = (SharedMemoryBackend(), HierarchicalBackend(), GlooBackend())
        assert [backend.name for backend in backends_for(CPU)] == [backend.name for backend in backends]
        communicator = ChoosingCommunicator(membership, CPU, 20.0, backends)
        outcome = begin_threads({0: communicator.start})
        time.sleep(0.2)
        communicator.abort()
        assert isinstance(outcome()[0], CancelledError)
        communicator.close()


def test_a_reduction_through_the_chosen_one() -> None:
    def body(communicator: Communicator, _: object) -> list[float]:
        tensor = torch.tensor([1.0 + communicator.rank])
        communicator.all_reduce(tensor, ReduceOp.MEAN).wait()
        return tensor.tolist()

    assert on_two_ranks(body) == [1.5]


def test_a_device_that_is_only_named_is_found_again_in_the_next_generation() -> None:
    """Where a backend's tensors are elsewhere than the name says, the name is still what the next group is made for."""

    asked: list[torch.device] = []

    class Named(Backend):
        name, devices = "named", ("xla",)

        def communicator(self, membership: Membership, device: torch.device, timeout_s: float) -> JoiningCommunicator:
            asked.append(device)
            return GlooBackend().communicator(membership, CPU, timeout_s)

    with RendezvousStore() as store:
        members = [store.membership("g", generation=number, rank=0, world_size=1) for number in range(2)]
        group = ChoosingCommunicator(members[0], torch.device("xla:1"), 10.0, [Named()])
        group.start()
        assert group.device == CPU
        group.reconfigure(members[1])
        group.close()
    assert set(asked) == {torch.device("xla:1")}


def carrier_and_sum(
    communicator: Communicator, membership: Callable[[int], Membership]
) -> tuple[list[str], list[float]]:
    """What carries the group, and its sums, on two hosts, on one, and on two again."""
    assert isinstance(communicator, ChoosingCommunicator)
    carriers, sums = [], []
    for generation in range(3):
        if generation:
            communicator.reconfigure(membership(generation))
        carriers.append(type(communicator._inner).__name__)
        tensor = torch.ones(3)
        communicator.all_reduce(tensor, ReduceOp.SUM).wait()
        sums.append(tensor[0].item())
    return carriers, sums


@pytest.mark.parametrize("backend", ["auto", "hierarchical"])
def test_hosts_that_are_known_decide(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    hosts = [("a", "b"), ("a", "a"), ("a", "b")]

    def main(rank: int) -> object:
        def membership(generation: int) -> Membership:
            return store.membership("g", generation=generation, rank=rank, world_size=2, hosts=hosts[generation])

        communicator = open_communicator(membership(0), device=CPU, timeout_s=20.0, backend=backend)
        try:
            return carrier_and_sum(communicator, membership)
        finally:
            communicator.close()

    with RendezvousStore() as store, caplog.at_level(logging.WARNING, "raydist"):
        outcomes = begin_threads({rank: functools.partial(main, rank) for rank in range(2)})()
    carriers = ["HierarchicalCommunicator", "SharedMemoryCommunicator", "HierarchicalCommunicator"]
    assert outcomes == dict.fromkeys(range(2), (carriers, [2.0] * 3))
    assert caplog.records == []  # what everybody knows before is no news


@pytest.mark.parametrize(
    ("hosts", "carriers"),
    [
        ("ab", ["hierarchical", "gloo"]),
        ("aab", ["hierarchical", "gloo"]),
        ("aa", ["shm", "hierarchical", "gloo"]),
        ("", ["shm", "gloo"]),
    ],
)
def test_what_is_tried_depends_on_who_shares_hosts(hosts: str, carriers: list[str]) -> None:
    membership = Membership("g", 0, 0, len(hosts) or 2, "127.0.0.1", 1, tuple(hosts))
    choosing = ChoosingCommunicator(membership, CPU, 1.0, backends_for(CPU))
    assert [backend.name for backend in choosing._suited()] == carriers


@pytest.mark.parametrize(
    ("backend", "hosts", "said"), [("shm", ("a", "b"), "on 2 hosts"), ("hierarchical", (), "nobody has said which")]
)
def test_what_cannot_serve_says_so_before_anybody_is_waited_for(
    backend: str, hosts: tuple[str, ...], said: str
) -> None:
    membership = Membership("g", 0, 0, 2, "127.0.0.1", 1, hosts)
    with pytest.raises(UnavailableError, match=f"The backend '{backend}' cannot carry group 'g'.*{said}"):
        open_communicator(membership, device=CPU, timeout_s=20.0, backend=backend)
