from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed

from raydist.collectives.base import Communicator
from raydist.collectives.opening import open_communicator
from raydist.collectives.rendezvous import RendezvousStore
from raydist.errors import DeadlineExceededError, FailedPreconditionError, InvalidArgumentError, RaydistError
from raydist.values import ReduceOp
from tests.collectives.processes import ProcessTeam
from tests.collectives.threads import begin_threads
from tests.contracts import communicator as contract

# Starting interpreters that import torch takes most of the time.
pytestmark = pytest.mark.timeout(180)

CPU = torch.device("cpu")


def stop_myself(communicator: Communicator) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def timed_failure_later(communicator: Communicator) -> tuple[float, RaydistError]:
    """Hears of the failure from who waited first."""
    time.sleep(0.3)
    return contract.timed_failure(communicator)


def test_a_stopped_peer_is_a_deadline_that_names_it(gloo_team: ProcessTeam) -> None:
    gloo_team.reform()
    resumed = gloo_team.begin({0: stop_myself})
    failures = gloo_team.begin({1: contract.timed_failure, 2: timed_failure_later})()
    gloo_team.resume(0)
    assert resumed() == {0: None}
    for seconds, error in failures.values():
        assert isinstance(error, DeadlineExceededError)
        assert "No sign of rank 0" in str(error)
        assert seconds < gloo_team.timeout_s + 2.0
    gloo_team.reform()
    contract.check_asynchronous(gloo_team)


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


WRONG: dict[str, Callable[[Communicator], object]] = {
    "all_gather needs 2 .* got 2, of which one is torch.int32": lambda one: one.all_gather(
        ones(2, dtype=torch.int32), torch.ones(3)
    ),
    "all_gather needs 2 .* got 3": lambda one: one.all_gather(ones(3), torch.ones(3)),
    "root must be a rank .* 0 to 1, got 2": lambda one: one.broadcast(torch.ones(3), 2),
    "root must be a rank .* 0 to 1, got -1": lambda one: one.broadcast(torch.ones(3), -1),
    "got a torch.sparse_coo one": lambda one: one.all_reduce(torch.eye(3).to_sparse(), ReduceOp.SUM),
}


def test_wrong_arguments_are_refused_before_anything_is_sent() -> None:
    def body(rank: int) -> float:
        member = store.membership("g", generation=0, rank=rank, world_size=2)
        group = open_communicator(member, device=CPU, timeout_s=10.0, backend="gloo")
        for message, call in WRONG.items():
            with pytest.raises(InvalidArgumentError, match=message):
                call(group)
        total = contract.sum_of_ones(group)
        group.close()
        return total

    with RendezvousStore() as store:
        assert begin_threads({rank: functools.partial(body, rank) for rank in range(2)})() == {0: 2.0, 1: 2.0}
