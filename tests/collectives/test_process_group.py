"""Communicators on process groups of torch: gloo and NCCL, limits, failures and translated errors."""

from __future__ import annotations

import functools
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from raydist.collectives.base import Communicator, Membership
from raydist.collectives.opening import open_communicator
from raydist.collectives.process_group import (
    Generation,
    NcclBackend,
    ProcessGroupBackend,
    RawGroup,
    RawWork,
)
from raydist.collectives.rendezvous import RendezvousStore
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
