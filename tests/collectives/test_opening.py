"""The table of backends, and how a group is opened."""

from __future__ import annotations

import errno
import functools
import logging
import os
from collections.abc import Callable, Sequence

import pytest
import torch

from raydist.collectives.base import Backend, Communicator, Membership
from raydist.collectives.hierarchical import HierarchicalBackend
from raydist.collectives.opening import AUTO, BACKENDS, _suited, backends_for, open_communicator
from raydist.collectives.process_group import GlooBackend, NcclBackend
from raydist.collectives.rendezvous import RendezvousStore
from raydist.collectives.shared_memory.communicator import SharedMemoryBackend
from raydist.collectives.xla.communicator import XlaBackend
from raydist.core.errors import InvalidArgumentError, UnavailableError
from raydist.core.values import ReduceOp
from tests.collectives.threads import begin_threads
from tests.contracts import communicator as contract

pytestmark = pytest.mark.timeout(120)

# --- opening ----------------------------------------------------------------------------------------------------------

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


def on_two_ranks(body: Callable[[Communicator], object], backend: str = "auto") -> object:
    """What `body` gives on both ranks."""

    def main(rank: int) -> object:
        membership = store.membership("g", generation=0, rank=rank, world_size=2)
        communicator = open_communicator(membership, device=CPU, timeout_s=20.0, backend=backend)
        try:
            return body(communicator)
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
        assert on_two_ranks(sum_and_kind) == (2.0, True)
    assert caplog.messages == []


@pytest.mark.usefixtures("no_room", "nothing_told")
def test_without_room_gloo_carries_the_group_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "raydist"):
        for _ in range(2):  # a strategy opens two groups, and each again after an error
            assert on_two_ranks(sum_and_kind) == (2.0, False)
    assert caplog.messages == [
        "group 'g', generation 0 is carried by gloo, not shm: every rank must map the segment, got "
        "rank 0: no shared memory: No space left on device."
    ]


@pytest.mark.usefixtures("no_room")
def test_without_room_shared_memory_by_name_is_an_error() -> None:
    with pytest.raises(UnavailableError, match=r"'shm' cannot carry group 'g'.* No space left .* Use the backend"):
        on_two_ranks(lambda communicator: None, backend="shm")


def test_the_whole_of_a_communicator_is_passed_on() -> None:
    def body(communicator: Communicator) -> object:
        return [repr(contract.reduce_everything(communicator)[0][0]), len(contract.move_everything(communicator))]

    assert on_two_ranks(body) == on_two_ranks(body, backend="gloo")


def test_a_reduction_through_the_chosen_one() -> None:
    def body(communicator: Communicator) -> list[float]:
        tensor = torch.tensor([1.0 + communicator.rank])
        communicator.all_reduce(tensor, ReduceOp.MEAN).wait()
        return tensor.tolist()

    assert on_two_ranks(body) == [1.5]


@pytest.mark.parametrize("backend", ["auto", "hierarchical"])
@pytest.mark.parametrize(
    ("hosts", "carrier"), [(("a", "b"), "HierarchicalCommunicator"), (("a", "a"), "SharedMemoryCommunicator")]
)
def test_hosts_that_are_known_decide(
    backend: str, hosts: tuple[str, ...], carrier: str, caplog: pytest.LogCaptureFixture
) -> None:
    def main(rank: int) -> object:
        membership = store.membership("g", generation=0, rank=rank, world_size=2, hosts=hosts)
        communicator = open_communicator(membership, device=CPU, timeout_s=20.0, backend=backend)
        try:
            return type(communicator).__name__, contract.sum_of_ones(communicator)
        finally:
            communicator.close()

    with RendezvousStore() as store, caplog.at_level(logging.WARNING, "raydist"):
        outcomes = begin_threads({rank: functools.partial(main, rank) for rank in range(2)})()
    assert outcomes == dict.fromkeys(range(2), (carrier, 2.0))
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
    assert [backend.name for backend in _suited(backends_for(CPU), membership)] == carriers


@pytest.mark.parametrize(
    ("backend", "hosts", "said"), [("shm", ("a", "b"), "on 2 hosts"), ("hierarchical", (), "nobody has said which")]
)
def test_what_cannot_serve_says_so_before_anybody_is_waited_for(
    backend: str, hosts: tuple[str, ...], said: str
) -> None:
    membership = Membership("g", 0, 0, 2, "127.0.0.1", 1, hosts)
    with pytest.raises(UnavailableError, match=f"The backend '{backend}' cannot carry group 'g'.*{said}"):
        open_communicator(membership, device=CPU, timeout_s=20.0, backend=backend)


# --- backend table ----------------------------------------------------------------------------------------------------


class OtherBackend(Backend):
    """A second one for a device that has one."""

    name = "other"
    devices = ("cpu", "mps")

    def open(self, membership: object, device: object, timeout_s: float) -> Communicator:
        raise NotImplementedError


WITH_OTHER: tuple[type[Backend], ...] = (*BACKENDS, OtherBackend)


def kinds(backends: Sequence[Backend]) -> list[type[Backend]]:
    return [type(backend) for backend in backends]


def test_each_device_has_its_backend() -> None:
    assert kinds(backends_for(CPU)) == [SharedMemoryBackend, HierarchicalBackend, GlooBackend]
    assert kinds(backends_for(torch.device("cuda:1"))) == [NcclBackend]
    assert kinds(backends_for(torch.device("xla:2"))) == [XlaBackend]
    with pytest.raises(InvalidArgumentError, match="one of cpu, cuda, xla, got device mps:0"):
        backends_for(torch.device("mps:0"))


def test_a_second_backend_of_a_device_is_chosen_by_its_name() -> None:
    assert kinds(backends_for(CPU, backends=WITH_OTHER)) == [*kinds(backends_for(CPU)), OtherBackend]
    assert kinds(backends_for(CPU, "other", backends=WITH_OTHER)) == [OtherBackend]
    assert kinds(backends_for(torch.device("mps:0"), backends=WITH_OTHER)) == [OtherBackend]


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    known = ", ".join(f'"{backend.name}"' for backend in BACKENDS)
    with pytest.raises(InvalidArgumentError, match=f"\"auto\" or one of {known}, got 'mpi'"):
        backends_for(CPU, "mpi")


def test_a_backend_that_does_not_serve_the_device() -> None:
    with pytest.raises(InvalidArgumentError, match="with the backend 'nccl' must be on one of cuda, got device cpu"):
        backends_for(CPU, "nccl")


def test_names_are_unique() -> None:
    names = [backend.name for backend in BACKENDS]
    assert len({*names, AUTO}) == len(names) + 1
