"""torch's process groups: gloo and NCCL, waits in slices, errors in our words."""

from __future__ import annotations

import functools
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from raydist.collectives.base import Communicator, Membership
from raydist.collectives.opening import open_communicator
from raydist.collectives.process_group import NcclBackend, wait_slice
from raydist.collectives.rendezvous import RendezvousStore
from raydist.collectives.translation import describe_operation, is_slice_over, translate_torch_error
from raydist.core.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    RaydistError,
    UnavailableError,
)
from raydist.core.values import ReduceOp
from tests.collectives.processes import ProcessTeam
from tests.collectives.threads import begin_threads

pytestmark = pytest.mark.timeout(180)

# --- process group ----------------------------------------------------------------------------------------------------

# Starting interpreters that import torch takes most of the time.

CPU = torch.device("cpu")


def default_group_exists(communicator: Communicator) -> bool:
    return torch.distributed.is_initialized()


def test_the_process_wide_group_is_not_touched(gloo_team: ProcessTeam) -> None:
    assert gloo_team.run(default_group_exists) == [False] * gloo_team.world_size


def test_a_member_that_does_not_arrive_is_named() -> None:
    with RendezvousStore() as store:
        start = time.monotonic()
        with pytest.raises(DeadlineExceededError, match="rank 1 did not arrive"):
            open_communicator(store.membership("g", generation=0, rank=0, world_size=2), device=CPU, timeout_s=0.3)
        assert time.monotonic() - start < 3.0


def test_a_store_that_is_gone_is_named() -> None:
    with RendezvousStore() as store:
        membership = store.membership("g", generation=0, rank=0, world_size=1)
    with pytest.raises(DeadlineExceededError, match=f"127.0.0.1:{membership.store_port}"):
        open_communicator(membership, device=CPU, timeout_s=0.2)


def test_a_device_without_backend() -> None:
    with RendezvousStore() as store:
        membership = store.membership("g", generation=0, rank=0, world_size=1)
        with pytest.raises(InvalidArgumentError, match="meta"):
            open_communicator(membership, device=torch.device("meta"), timeout_s=1.0)
        with pytest.raises(InvalidArgumentError, match="'mpi'"):
            open_communicator(membership, device=CPU, timeout_s=1.0, backend="mpi")


def test_two_groups_in_one_process_and_closing_twice() -> None:
    def body(rank: int) -> list[float]:
        groups = [
            open_communicator(store.membership(name, generation=0, rank=rank, world_size=2), device=CPU, timeout_s=10.0)
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
        return [tensor.item() for tensor in tensors]

    with RendezvousStore() as store:
        assert begin_threads({rank: functools.partial(body, rank) for rank in range(2)})() == {0: [3, 30], 1: [3, 30]}


def ones(count: int, length: int = 3, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.ones(length, dtype=dtype) for _ in range(count)]


# --- nccl -------------------------------------------------------------------------------------------------------------


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


# --- wait slice -------------------------------------------------------------------------------------------------------


class FakeWork:
    """torch's Work: `wait(limit)` of an unfinished one raises, `wait()` blocks."""

    def __init__(self, error: str | None = None) -> None:
        self.done = threading.Event()
        self.error = error
        self.limits: list[timedelta | None] = []

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self, limit: timedelta | None = None) -> bool:
        self.limits.append(limit)
        if not self.done.wait(30 if limit is None else limit.total_seconds()):
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)
        return True


def test_slices_until_it_is_completed() -> None:
    work = FakeWork()
    assert not wait_slice(work, 0.0)
    work.done.set()
    assert wait_slice(work, 10.0)


def test_errors_come_out() -> None:
    work = FakeWork("Connection closed by peer")
    work.done.set()
    with pytest.raises(RuntimeError, match="Connection closed"):
        wait_slice(work, 10.0)


def test_a_slice_of_zero_is_not_no_limit() -> None:
    work = FakeWork()
    wait_slice(work, 0.0)
    assert work.limits == [timedelta(milliseconds=1)]


# --- translation ------------------------------------------------------------------------------------------------------

MEMBERSHIP = Membership("g", generation=3, rank=1, world_size=4)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
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
    ],
)
def test_known_messages(text: str, kind: type[RaydistError]) -> None:
    error = translate_torch_error(
        RuntimeError(f"{text}\nException raised from somewhere"), MEMBERSHIP, "all_reduce(SUM)"
    )
    assert type(error) is kind
    assert str(error) == f"all_reduce(SUM) by rank 1 of 4 (group 'g', generation 3) failed: {text}"


def test_own_errors_pass() -> None:
    error = CancelledError("x")
    assert translate_torch_error(error, MEMBERSHIP, "barrier") is error


def test_the_end_of_a_slice_is_no_failure() -> None:
    assert is_slice_over(RuntimeError("Operation timed out!"))
    assert not is_slice_over(RuntimeError("Timed out waiting 2000ms for recv operation to complete"))


def test_describe() -> None:
    assert describe_operation(MEMBERSHIP, "barrier") == "barrier by rank 1 of 4 (group 'g', generation 3)"
