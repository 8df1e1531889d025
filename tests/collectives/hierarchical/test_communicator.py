from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from raydist.collectives.base import Communicator
from raydist.collectives.hierarchical.communicator import HierarchicalCommunicator
from raydist.collectives.rendezvous.store import RendezvousStore
from raydist.errors import CollectiveMismatchError, DeadlineExceededError, FailedPreconditionError, InvalidArgumentError
from raydist.values import ReduceOp
from tests.collectives.hierarchical.ranks import SHAPES, hosted_team, run_hosted
from tests.contracts import communicator as contract


@pytest.mark.parametrize("hosts", SHAPES)
@pytest.mark.parametrize("check", [contract.check_moves, contract.check_tensor_kinds, contract.check_swaps])
def test_hosts_of_all_shapes_keep_the_contract(hosts: str, check: object) -> None:
    assert callable(check)
    with hosted_team(hosts) as team:
        check(team)


def allocate_other_sizes(communicator: Communicator) -> str:
    with pytest.raises(CollectiveMismatchError) as caught:
        communicator.allocate([(10 + communicator.rank // 2, torch.float32)])
    communicator.barrier()
    return caught.value.message


def test_hosts_that_allocate_other_sizes_learn_of_it() -> None:
    messages = run_hosted("aabb", allocate_other_sizes)
    assert len(set(messages)) == 1
    assert all(f"rank {rank}: allocate(1 tensors" in messages[0] for rank in range(4))


def many_at_once(communicator: Communicator) -> list[float]:
    """More than there are slots for: by way of leaders in slots and in bays, and in lanes."""
    tensors = [torch.ones(numel) for _ in range(20) for numel in (3, 20_000, 60_000)]
    works = [communicator.all_reduce(tensor, ReduceOp.SUM) for tensor in tensors]
    for work in works:
        work.wait()
    return [tensor.unique().item() for tensor in tensors]


@pytest.mark.parametrize("hosts", ["ab", "aab", "abc"])
def test_many_may_be_under_way(hosts: str) -> None:
    assert run_hosted(hosts, many_at_once) == [[float(len(hosts))] * 60] * len(hosts)


def reduced_in_turn(communicator: Communicator) -> list[list[float]]:
    """Of a length that goes through bays, each time other numbers: nobody may read those of before or after."""
    results = []
    for turn in range(9):
        tensor = torch.full((9_001,), 10.0 * turn + communicator.rank)
        communicator.all_reduce(tensor, (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MEAN)[turn % 3]).wait()
        results.append(tensor.unique().tolist())
    return results


@pytest.mark.parametrize("hosts", ["ab", "aabb", "aabbbcc"])
def test_what_goes_by_way_of_leaders_is_reduced_one_after_the_other(hosts: str) -> None:
    size = len(hosts)
    brought = [[10.0 * turn + rank for rank in range(size)] for turn in range(9)]
    expected = [[(sum(all_), max(all_), sum(all_) / size)[turn % 3]] for turn, all_ in enumerate(brought)]
    assert run_hosted(hosts, reduced_in_turn) == [expected] * size


def noted_calls(communicator: Communicator) -> list[bool]:
    noted = []
    for numel in (3, 20_000, 60_000):
        for marked in (True, False):
            if marked and communicator.rank == 1:
                communicator.note()
            work = communicator.all_reduce(torch.ones(numel), ReduceOp.SUM)
            work.wait()
            noted.append(work.noted)
    return noted


@pytest.mark.parametrize("hosts", ["ab", "aab", "abb"])
def test_all_hosts_learn_which_call_a_rank_has_marked(hosts: str) -> None:
    assert run_hosted(hosts, noted_calls) == [[True, False] * 3] * len(hosts)


def announced_calls(communicator: Communicator) -> str:
    communicator.announce(f"what rank {communicator.rank} wants")
    with pytest.raises(CollectiveMismatchError) as caught:
        communicator.all_reduce(torch.ones(3 + communicator.rank), ReduceOp.SUM).wait()
    return caught.value.message


@pytest.mark.parametrize("hosts", ["ab", "aab"])
def test_messages_show_what_was_announced(hosts: str) -> None:
    (message,) = set(run_hosted(hosts, announced_calls))
    assert all(f"rank {rank}: what rank {rank} wants as call 0" in message for rank in range(len(hosts)))


def refused(communicator: Communicator) -> None:
    calls: tuple[Callable[[], object], ...] = (
        lambda: communicator.broadcast(torch.ones(1), 2),
        lambda: communicator.reduce(torch.ones(1), -1, ReduceOp.SUM),
        lambda: communicator.send(torch.ones(1), 9),
        lambda: communicator.recv(torch.ones(1), 9),
        lambda: communicator.all_gather([torch.ones(1)], torch.ones(1)),
        lambda: communicator.all_to_all([torch.ones(1)], [torch.ones(1)]),
    )
    for call in calls:
        with pytest.raises(InvalidArgumentError):
            call()
    communicator.barrier()


def test_what_cannot_be_is_refused() -> None:
    run_hosted("ab", refused)


def test_a_closed_group_says_so() -> None:
    with hosted_team("ab") as team:
        group = team._groups[0]
        group.close()
        with pytest.raises(FailedPreconditionError, match="closed"):
            group.barrier()


def test_who_comes_alone_is_told_who_is_missing() -> None:
    with RendezvousStore() as store:
        membership = store.membership("g", generation=0, rank=1, world_size=3, hosts=("a", "b", "b"))
        alone = HierarchicalCommunicator(membership, torch.device("cpu"), 0.3)
        with pytest.raises(DeadlineExceededError, match="rank 1 of 3 .* ranks 0, 2 did not arrive"):
            alone.start()
        alone.close()


def num_held() -> int:
    gc.collect()
    return len([path for path in Path("/proc/self/fd").iterdir() if os.path.lexists(path)])


def test_nothing_is_left_behind() -> None:
    run_hosted("abc", many_at_once)
    before = num_held()
    for _ in range(3):
        run_hosted("abc", many_at_once)
    assert num_held() <= before + 1


def looks_of_a_start(communicator: HierarchicalCommunicator) -> tuple[int, int]:
    """How often a rank looks for something to do when it starts a reduction through a bay, and a second one."""
    joined = communicator._joined
    assert joined is not None
    with mock.patch.object(joined.generation, "advance", wraps=joined.generation.advance) as advance:
        first = communicator.all_reduce(torch.ones(9_001), ReduceOp.SUM)
        alone = advance.call_count
        second = communicator.all_reduce(torch.ones(9_001), ReduceOp.SUM)
        behind = advance.call_count - alone
    first.wait()
    second.wait()
    return alone, behind


def test_who_has_brought_all_leaves_it_to_its_leader() -> None:
    """A look takes nine calls, and a rank that waits next looks anyway."""
    assert run_hosted("aabb", looks_of_a_start) == [(1, 1), (0, 1), (1, 1), (0, 1)]
