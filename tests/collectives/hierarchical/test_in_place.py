"""Large reductions: through staging memory and in place, on hosts of all shapes, against plain sums."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from raydist.collectives.base import Communicator
from raydist.collectives.hierarchical import lane, windows
from raydist.collectives.hierarchical.lane import BlockExchange
from raydist.values import ReduceOp
from tests.collectives.hierarchical.ranks import SHAPES, run_hosted

BLOCK = 64 << 10
# Less than a window, many windows and a rest, exactly eight windows of two lanes; so many that blocks are larger.
NUMELS = (5_000, 345_679, 4 * 2 * BLOCK // 4, 600_001)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of which tensors have several that are quick to add up."""
    monkeypatch.setattr(windows, "_MOST_BLOCK", BLOCK // 2)
    monkeypatch.setattr(windows, "_LARGE_BLOCK", BLOCK)


def brought(rank: int, numel: int) -> torch.Tensor:
    return (torch.arange(numel) % 11).float() + rank


def reduce_all(communicator: Communicator) -> list[tuple[bool, bool, bool]]:
    rank, size = communicator.rank, communicator.world_size
    results = []
    for numel in NUMELS:
        expected = sum((brought(other, numel) for other in range(size)), torch.zeros(numel))
        plain, at_root = brought(rank, numel), brought(rank, numel)
        (shared,) = communicator.allocate([(numel, torch.float32)])
        shared.copy_(plain)
        works = [
            communicator.all_reduce(plain, ReduceOp.SUM),
            communicator.all_reduce(shared, ReduceOp.MEAN),
            communicator.reduce(at_root, size - 1, ReduceOp.SUM),
        ]
        for work in works:
            work.wait()
        results.append(
            (
                torch.equal(plain, expected),
                torch.equal(shared, expected / size),
                rank != size - 1 or torch.equal(at_root, expected),
            )
        )
    return results


@pytest.mark.parametrize("hosts", SHAPES)
def test_sums_are_those_of_all_ranks(hosts: str) -> None:
    assert run_hosted(hosts, reduce_all) == [[(True, True, True)] * len(NUMELS)] * len(hosts)


def one_host_shares(communicator: Communicator) -> bool:
    """Where rank 0's host has its tensors in shared memory, and the others have not."""
    (shared,) = communicator.allocate([(600_001, torch.float64)])
    tensor = shared if communicator.membership.hosts[communicator.rank] == "a" else torch.empty(600_001).double()
    tensor.fill_(communicator.rank)
    communicator.all_reduce(tensor, ReduceOp.SUM).wait()
    return bool((tensor == sum(range(communicator.world_size))).all())


@pytest.mark.parametrize("hosts", ["aabb", "aabbcc", "abb"])
def test_hosts_need_not_do_alike(hosts: str) -> None:
    assert run_hosted(hosts, one_host_shares) == [True] * len(hosts)


def same_bits(communicator: Communicator) -> torch.Tensor:
    generator = torch.Generator().manual_seed(communicator.rank)
    tensor = torch.randn(300_000, generator=generator)
    communicator.all_reduce(tensor, ReduceOp.SUM).wait()
    return tensor


@pytest.mark.parametrize("hosts", ["aabb", "abcc"])
def test_all_ranks_get_the_same_bits_every_time(hosts: str) -> None:
    first, *others = run_hosted(hosts, same_bits) + run_hosted(hosts, same_bits)
    assert all(torch.equal(first, other) for other in others)


def reduced_again(communicator: Communicator) -> list[list[float]]:
    """The same memory, twice by each operation, with other numbers every time; beside it another tensor."""
    rank, (shared, other) = communicator.rank, communicator.allocate([(400_003, torch.float32), (70_001, torch.int64)])
    found = []
    for turn, op in enumerate(2 * (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX)):
        shared.fill_(10.0 * turn + rank)
        other.fill_(turn * rank)
        works = [communicator.all_reduce(shared, op), communicator.all_reduce(other, ReduceOp.SUM)]
        for work in works:
            work.wait()
        found.append([*shared.unique().tolist(), *other.unique().tolist()])
    return found


@pytest.mark.parametrize("hosts", ["ab", "aabb", "abc"])
def test_the_same_memory_is_reduced_in_several_ways(hosts: str) -> None:
    size = len(hosts)
    total = sum(range(size))
    expected = [
        [
            {0: 10.0 * turn * size + total, 1: 10.0 * turn + total / size, 2: 10.0 * turn + size - 1}[turn % 3],
            turn * total,
        ]
        for turn in range(6)
    ]
    assert run_hosted(hosts, reduced_again) == [expected] * size


def dropped(communicator: Communicator) -> bool:
    """Whether memory is let go of with the tensor in it, though it has been reduced."""
    (shared,) = communicator.allocate([(300_000, torch.float32)])
    shared.fill_(1.0)
    communicator.all_reduce(shared, ReduceOp.SUM).wait()
    communicator.barrier()  # nobody looks at the others' copies any more
    before = num_mapped(shared.data_ptr())
    place = shared.data_ptr()
    del shared
    gc.collect()
    return before == 1 and num_mapped(place) == 0


def num_mapped(address: int) -> int:
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return sum(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


@pytest.mark.parametrize("hosts", ["ab", "aab"])
def test_memory_goes_with_its_tensor(hosts: str) -> None:
    assert run_hosted(hosts, dropped) == [True] * len(hosts)


@pytest.mark.parametrize("hosts", ["ab", "aabb"])
def test_what_is_exchanged_is_worked_out_once(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(*args: Any) -> BlockExchange:
        made.append(1)
        return BlockExchange(*args)

    monkeypatch.setattr(lane, "BlockExchange", counted)

    def num_made(communicator: Communicator) -> list[int]:
        (shared,) = communicator.allocate([(300_000, torch.float32)])
        found = []
        for _ in range(3):
            communicator.all_reduce(shared.fill_(1.0), ReduceOp.SUM).wait()
            communicator.barrier()
            found.append(len(made))
            communicator.barrier()  # nobody begins the next one while others count
        return found

    for first, *later in run_hosted(hosts, num_made):
        assert first > 0
        assert later == [first, first]
