"""The table of backends, opening a group, and the rendezvous store."""

from __future__ import annotations

import errno
import functools
import logging
import os
import socket
from collections.abc import Callable

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from raydist.collectives.base import Communicator, Membership
from raydist.collectives.opening import BACKENDS, _suited, backends_for, open_communicator
from raydist.collectives.rendezvous import ErrorBroadcast, RendezvousStore, connect_store, local_address
from raydist.core.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from tests.collectives.threads import begin_threads
from tests.contracts import communicator as contract

pytestmark = pytest.mark.timeout(120)

CPU = torch.device("cpu")


def on_two_ranks(body: Callable[[Communicator], object], backend: str = "auto", hosts: tuple[str, ...] = ()) -> object:
    """Return the result of `body`, which must be equal on both ranks."""

    def main(rank: int) -> object:
        membership = store.membership("g", generation=0, rank=rank, world_size=2, hosts=hosts)
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


def test_without_room_gloo_carries_the_group_and_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr("raydist.collectives.opening._told", set())
    with caplog.at_level(logging.WARNING, "raydist"):
        for _ in range(2):  # a strategy opens two groups, and each again after an error
            assert on_two_ranks(lambda it: (contract.sum_of_ones(it), it.checks_itself)) == (2.0, False)
    assert caplog.messages == [
        "group 'g', generation 0 is carried by gloo, not shm: every rank must map the segment, got "
        "rank 0: no shared memory: No space left on device."
    ]
    with pytest.raises(UnavailableError, match=r"'shm' cannot carry group 'g'.* No space left .* Use the backend"):
        on_two_ranks(lambda communicator: None, backend="shm")


def test_hosts_that_are_known_decide(caplog: pytest.LogCaptureFixture) -> None:
    table: list[tuple[str, tuple[str, ...], str]] = [
        ("auto", (), "SharedMemoryCommunicator"),
        ("auto", ("a", "b"), "HierarchicalCommunicator"),
        ("auto", ("a", "a"), "SharedMemoryCommunicator"),
        ("hierarchical", ("a", "a"), "SharedMemoryCommunicator"),
    ]
    with caplog.at_level(logging.WARNING, "raydist"):
        for backend, hosts, carrier in table:
            found = on_two_ranks(lambda it: (type(it).__name__, contract.sum_of_ones(it)), backend, hosts)
            assert found == (carrier, 2.0), (backend, hosts)
    assert caplog.records == []  # what everybody knows before is no news


def test_what_is_tried_depends_on_who_shares_hosts() -> None:
    table = {
        "ab": ["hierarchical", "gloo"],
        "aab": ["hierarchical", "gloo"],
        "aa": ["shm", "hierarchical", "gloo"],
        "": ["shm", "gloo"],
    }
    for hosts, carriers in table.items():
        membership = Membership("g", 0, 0, len(hosts) or 2, "127.0.0.1", 1, tuple(hosts))
        assert [backend.name for backend in _suited(backends_for(CPU), membership)] == carriers, hosts
    cannot = [("shm", ("a", "b"), "on 2 hosts"), ("hierarchical", (), "nobody has said which")]
    for backend, names, said in cannot:  # says so before anybody is waited for
        membership = Membership("g", 0, 0, 2, "127.0.0.1", 1, names)
        with pytest.raises(UnavailableError, match=f"The backend '{backend}' cannot carry group 'g'.*{said}"):
            open_communicator(membership, device=CPU, timeout_s=20.0, backend=backend)


def test_each_device_has_its_backend_and_others_are_told_what_there_is() -> None:
    table = {"cpu": ["shm", "hierarchical", "gloo"], "cuda:1": ["nccl"], "xla:2": ["xla"]}
    for device, names in table.items():
        assert [backend.name for backend in backends_for(torch.device(device))] == names
    with pytest.raises(InvalidArgumentError, match="one of cpu, cuda, xla, got device mps:0"):
        backends_for(torch.device("mps:0"))
    known = ", ".join(f'"{backend.name}"' for backend in BACKENDS)
    with pytest.raises(InvalidArgumentError, match=f"\"auto\" or one of {known}, got 'mpi'"):
        backends_for(CPU, "mpi")
    with pytest.raises(InvalidArgumentError, match="with the backend 'nccl' must be on one of cuda, got device cpu"):
        backends_for(CPU, "nccl")


def test_generations_and_groups_do_not_see_each_other() -> None:
    with RendezvousStore("127.0.0.1") as store:
        ends = [
            connect_store(store.membership(group, generation=generation, rank=0, world_size=1), 5.0)
            for group, generation in (("a", 0), ("a", 1), ("b", 0))
        ]
        ends[0].set("key", "value")
        assert [end.check(["key"]) for end in ends] == [True, False, False]
        with socket.socket() as other:
            # It listens only where it is told: the same port of another address of this machine is still free.
            other.bind(("127.0.0.2", store.port))
            assert local_address(store.membership("g", generation=0, rank=0, world_size=1)) == "127.0.0.1"


def test_closed_store_frees_its_port_and_has_none() -> None:
    store = RendezvousStore("127.0.0.1").start()
    port = store.port
    store.close()
    store.close()
    with pytest.raises(FailedPreconditionError, match="started"):
        _ = store.port
    with pytest.raises(DeadlineExceededError, match=f"127.0.0.1:{port} did not accept a connection for 0.3 s"):
        connect_store(Membership("g", 0, 0, 1, "127.0.0.1", port), 0.3)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))


def bulletins(world_size: int) -> list[ErrorBroadcast]:
    store = PrefixStore("g/0", HashStore())
    return [ErrorBroadcast(store, Membership("g", 0, rank, world_size)) for rank in range(world_size)]


def test_the_first_failure_stays() -> None:
    first, second = bulletins(2)
    assert not second.listen()
    second.check("a test")
    first.fail(UnavailableError("rank 0: two\nlines."))
    first.fail(CancelledError("later"))
    assert second.listen()
    assert not second.listen()
    for member in (first, second):
        with pytest.raises(UnavailableError, match="by rank . of 2 .* was given up: rank 0: two\nlines. Open"):
            member.check("a test")
    assert str(first.name_missing_ranks()) == "rank 0: two\nlines. No sign of rank 1."
    aborted, _ = bulletins(2)
    aborted.fail(CancelledError("rank 0 aborted"))
    assert str(aborted.name_missing_ranks()) == "rank 0 aborted"
