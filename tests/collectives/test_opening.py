"""The table of backends, opening a group, and the rendezvous store."""

from __future__ import annotations

import errno
import functools
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from raydist.collectives.base import Backend, Communicator, Membership
from raydist.collectives.hierarchical import HierarchicalBackend
from raydist.collectives.opening import BACKENDS, _suited, backends_for, open_communicator
from raydist.collectives.process_group import GlooBackend, NcclBackend
from raydist.collectives.rendezvous import ErrorBroadcast, RendezvousStore, connect_store, local_address
from raydist.collectives.shared_memory.communicator import SharedMemoryBackend
from raydist.collectives.xla.communicator import XlaBackend
from raydist.core.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    RaydistError,
    UnavailableError,
)
from tests.collectives.threads import begin_threads
from tests.contracts import communicator as contract

pytestmark = pytest.mark.timeout(120)

# --- opening ----------------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no room for shared memory."""

    def refuse(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)


@pytest.fixture
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has not said yet what carries its groups."""
    monkeypatch.setattr("raydist.collectives.opening._told", set())


def on_two_ranks(body: Callable[[Communicator], object], backend: str = "auto") -> object:
    """Return the result of `body`, which must be equal on both ranks."""

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


def kinds(backends: Sequence[Backend]) -> list[type[Backend]]:
    return [type(backend) for backend in backends]


def test_each_device_has_its_backend() -> None:
    assert kinds(backends_for(CPU)) == [SharedMemoryBackend, HierarchicalBackend, GlooBackend]
    assert kinds(backends_for(torch.device("cuda:1"))) == [NcclBackend]
    assert kinds(backends_for(torch.device("xla:2"))) == [XlaBackend]
    with pytest.raises(InvalidArgumentError, match="one of cpu, cuda, xla, got device mps:0"):
        backends_for(torch.device("mps:0"))


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    known = ", ".join(f'"{backend.name}"' for backend in BACKENDS)
    with pytest.raises(InvalidArgumentError, match=f"\"auto\" or one of {known}, got 'mpi'"):
        backends_for(CPU, "mpi")


def test_a_backend_that_does_not_serve_the_device() -> None:
    with pytest.raises(InvalidArgumentError, match="with the backend 'nccl' must be on one of cuda, got device cpu"):
        backends_for(CPU, "nccl")


# --- rendezvous -------------------------------------------------------------------------------------------------------


def test_generations_and_groups_do_not_see_each_other() -> None:
    with RendezvousStore() as store:
        ends = [
            connect_store(store.membership(group, generation=generation, rank=0, world_size=1), 5.0)
            for group, generation in (("a", 0), ("a", 1), ("b", 0))
        ]
        ends[0].set("key", "value")
        assert [end.check(["key"]) for end in ends] == [True, False, False]


def test_listens_only_where_it_is_told() -> None:
    with RendezvousStore("127.0.0.1") as store, socket.socket() as other:
        # The same port of another address of this machine is still free.
        other.bind(("127.0.0.2", store.port))
        assert local_address(store.membership("g", generation=0, rank=0, world_size=1)) == "127.0.0.1"


def test_closed_store_frees_its_port_and_has_none() -> None:
    store = RendezvousStore().start()
    port = store.port
    store.close()
    store.close()
    with pytest.raises(FailedPreconditionError, match="started"):
        _ = store.port
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(DeadlineExceededError, match=f"127.0.0.1:{port} did not accept a connection for 0.3 s"):
        connect_store(Membership("g", 0, 0, 1, "127.0.0.1", port), 0.3)


# --- error broadcast --------------------------------------------------------------------------------------------------


def bulletins(world_size: int) -> list[ErrorBroadcast]:
    store = PrefixStore("g/0", HashStore())
    return [ErrorBroadcast(store, Membership("g", 0, rank, world_size)) for rank in range(world_size)]


def test_who_does_not_arrive_is_named() -> None:
    with pytest.raises(DeadlineExceededError, match=r"a test by rank 0 of 3 .* ranks 1, 2 did not arrive"):
        bulletins(3)[0].exchange(b"", "a test", 0.0)


def test_waiting_can_be_given_up() -> None:
    waiting, other = bulletins(2)
    other.fail(CancelledError("aborted"))
    with pytest.raises(CancelledError):
        waiting.exchange(b"", "a test", 60.0)


@pytest.mark.parametrize("kind", [CancelledError, DeadlineExceededError, UnavailableError])
def test_the_first_failure_stays(kind: type[RaydistError]) -> None:
    first, second = bulletins(2)
    assert not second.listen()
    second.check("a test")
    first.fail(kind("rank 0: two\nlines"))
    first.fail(CancelledError("later"))
    assert second.listen()
    assert not second.listen()
    for member in (first, second):
        with pytest.raises(kind, match="a test by rank . of 2 .* was given up: rank 0: two\nlines Open the group anew"):
            member.check("a test")


def test_a_failure_names_the_ranks_that_do_not_answer() -> None:
    first, _ = bulletins(2)
    first.fail(UnavailableError("Connection closed."))
    assert str(first.name_missing_ranks()) == "Connection closed. No sign of rank 1."
    aborted, _ = bulletins(2)
    aborted.fail(CancelledError("rank 0 aborted"))
    assert str(aborted.name_missing_ranks()) == "rank 0 aborted"


def test_check_liveness() -> None:
    first, second, third = bulletins(3)
    assert first.check_liveness(0.0) == (1, 2)
    assert third.check_liveness(0.0) == (1,)
    assert second.check_liveness(60.0) == ()


def test_the_last_living_rank_to_report_is_not_missing() -> None:
    first, second = bulletins(2)
    later = threading.Timer(0.01, second.check_liveness, [0.0])
    later.start()
    assert first.check_liveness(5.0) == ()
    later.join()
