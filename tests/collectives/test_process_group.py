"""Communicators on process groups of torch: gloo and NCCL, limits, failures and translated errors."""

from __future__ import annotations

import errno
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from raydist.collectives.base import Communicator, Membership
from raydist.collectives.opening import BACKENDS, _suited, backends_for, open_communicator
from raydist.collectives.process_group import (
    Generation,
    NcclBackend,
    ProcessGroupBackend,
    RawGroup,
    RawWork,
)
from raydist.collectives.rendezvous import ErrorBroadcast, RendezvousStore, connect_store, local_address
from raydist.collectives.translation import is_slice_over, translate_torch_error
from raydist.core.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from raydist.core.values import ReduceOp
from tests.collectives.threads import begin_threads
from tests.contracts import communicator as contract

pytestmark = pytest.mark.timeout(180)


def test_two_groups_in_one_process_and_closing_twice() -> None:
    def body(rank: int) -> list[float]:
        groups = [
            open_communicator(
                store.membership(name, generation=0, rank=rank, world_size=2),
                device=torch.device("cpu"),
                timeout_s=10.0,
                backend="gloo",
            )
            for name in ("one", "two")
        ]
        # The two groups are used in different orders by the ranks: they must not see each other.
        tensors = [torch.tensor([rank + 1.0]), torch.tensor([10.0 * (rank + 1)])]
        works = {k: groups[k].all_reduce(tensors[k], ReduceOp.SUM) for k in ((0, 1) if rank else (1, 0))}
        for k in (0, 1):
            works[k].wait()
            groups[k].close()
            groups[k].close()
        with pytest.raises(FailedPreconditionError, match="closed"):
            groups[0].all_reduce(tensors[0], ReduceOp.SUM)
        assert not dist.is_initialized()  # the process-wide group is not touched
        return [tensor.item() for tensor in tensors]

    with RendezvousStore() as store:
        assert begin_threads({rank: functools.partial(body, rank) for rank in range(2)})() == {0: [3, 30], 1: [3, 30]}


@pytest.mark.skipif(dist.is_nccl_available(), reason="this PyTorch has NCCL")
def test_nccl_that_is_not_there() -> None:
    with pytest.raises(UnavailableError, match="built with NCCL"):
        NcclBackend().create(HashStore(), Membership("g", 0, 0, 1, "127.0.0.1", 1), timeout_s=5.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nccl_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    backend = NcclBackend()
    group = backend.create(HashStore(), Membership("g", 0, 0, 1, "127.0.0.1", 1), timeout_s=30.0)
    tensor = torch.ones(2, device="cuda")
    group.allreduce([tensor], dist.AllreduceOptions()).wait()
    backend.kill(group)
    assert tensor.tolist() == [1.0, 1.0]


def test_known_messages() -> None:
    table = [
        ("[pair.cc:553] Connection closed by peer [10.0.0.1]:2294. GLHF!", UnavailableError),
        ("[pair.cc:537] Read error [127.0.0.1]:9: Connection reset by peer", UnavailableError),
        ("writev [127.0.0.1]:9: Broken pipe", UnavailableError),
        ("Failed to recv, got 0 bytes. Did the remote server shutdown or crash?", UnavailableError),
        ("Timed out waiting 2000ms for recv operation to complete", DeadlineExceededError),
        ("Application timeout caused pair closure", DeadlineExceededError),
        ("NCCL communicator was aborted on rank 0.", CancelledError),
        ("Invalid scalar type", InvalidArgumentError),
        ("all_reduce does not supporton complex tensors", InvalidArgumentError),
        ("something new", UnavailableError),
    ]
    membership = Membership("g", generation=3, rank=1, world_size=4)
    for text, kind in table:
        error = translate_torch_error(RuntimeError(f"{text}\nException raised from"), membership, "all_reduce(SUM)")
        assert type(error) is kind, text
        assert str(error) == f"all_reduce(SUM) by rank 1 of 4 (group 'g', generation 3) failed: {text}"
    # The end of a slice is no failure.
    assert is_slice_over(RuntimeError("Operation timed out!"))
    assert not is_slice_over(RuntimeError("Timed out waiting 2000ms for recv operation to complete"))


class ManualWork:
    """Lands when the test says so."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self, limit: timedelta | None = None) -> None:
        if not self.done.wait(None if limit is None else limit.total_seconds()):
            raise RuntimeError("Operation timed out!")


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


def begin(generation: Generation, work: ManualWork) -> RawWork:
    return generation.submit("barrier", lambda _: work)


def test_refused_arguments_do_not_fail_the_group_and_a_landed_work_counts_even_after_an_abort() -> None:
    def refuse(group: RawGroup) -> dist.Work:
        raise RuntimeError("Invalid scalar type")

    work, pending = ManualWork(), ManualWork()
    with RendezvousStore() as store:
        membership = store.membership("g", generation=0, rank=0, world_size=1)
        generation = Generation.join(membership, ManualBackend(), timeout_s=0.2)
        with pytest.raises(InvalidArgumentError, match="barrier by rank 0 of 1"):
            generation.submit("barrier", refuse)
        begin(generation, work)
        work.done.set()
        generation.abort()
        generation.wait(work, "barrier", None)
        with pytest.raises(CancelledError, match="rank 0 aborted group 'g', generation 0"):
            generation.wait(pending, "barrier", None)


class DeviceBackend(ManualBackend):
    """As of a GPU: waiting for work does not block the host."""

    host_runs_ahead = True


class DeviceWork(ManualWork):
    """Fails the test where anything but the watchdog asks whether it has landed."""

    waits = 0

    def is_completed(self) -> bool:
        assert threading.current_thread() is not threading.main_thread()
        return super().is_completed()

    def wait(self, limit: timedelta | None = None) -> None:
        assert limit is None, "with a limit torch blocks the host"
        self.waits += 1


def test_the_host_does_not_wait_for_a_device_and_a_watchdog_ends_a_group_whose_collective_hangs() -> None:
    with RendezvousStore() as store:
        backend = DeviceBackend()
        membership = store.membership("g", generation=0, rank=0, world_size=1)
        generation = Generation.join(membership, backend, timeout_s=0.5)
        works = [DeviceWork() for _ in range(3)]
        for work in works:
            begin(generation, work)
            generation.wait(work, "all_reduce", None)
        assert [work.waits for work in works] == [1] * 3
        works[0].done.set()  # the others hang
        deadline = time.monotonic() + 10
        while not backend.killed and time.monotonic() < deadline:
            time.sleep(0.02)
        assert backend.killed == 1
        with pytest.raises(DeadlineExceededError, match=r"barrier by rank 0 .* given up: .*timed out after 0\.5 s"):
            generation.wait(works[1], "barrier", None)
        with pytest.raises(DeadlineExceededError, match="given up"):
            begin(generation, DeviceWork())
        generation.leave()


# --- the table of backends, and the rendezvous store ------------------------------------------------------------------

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
