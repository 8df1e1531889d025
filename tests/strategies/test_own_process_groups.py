"""A step that calls torch.distributed itself: in a process group that it has opened, beside what replicas have."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

import raydist as rd

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

GROUPS = 5  # what a process has more after as many, but not one for each, is Ray's


def is_open() -> bool:
    return distributed.is_initialized()


def close_group() -> bool:
    """Who reads what this gives waits for both: who leaves early tears the other's connection."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
    return not is_open()


def sum_of_ranks() -> float:
    total = torch.tensor(float(rd.get_replica_context().replica_id_in_sync_group + 1))
    distributed.all_reduce(total)
    return total.item()


def extent() -> tuple[int, int]:
    """Threads and descriptors of the process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


@pytest.fixture
def opens(two: rd.MirroredStrategy, tmp_path: Path) -> Iterator[Callable[..., bool]]:
    """A step that opens the group."""

    def open_group(number: int = 0) -> bool:
        context = rd.get_replica_context()
        rank, size = context.replica_id_in_sync_group, context.num_replicas_in_sync
        path = f"file://{tmp_path}/store-{number}"  # each has a new one: who is late to leave deletes the file
        distributed.init_process_group("gloo", init_method=path, rank=rank, world_size=size)
        return is_open()

    yield open_group
    assert two.run(close_group).values == (True, True)


def test_it_lasts_from_step_to_step_beside_the_collectives_of_replicas(
    two: rd.MirroredStrategy, opens: Callable[..., bool]
) -> None:
    with two.scope():
        weight = nn.Parameter(torch.zeros(()))

    def both() -> tuple[float, float, float]:
        context = rd.get_replica_context()
        weight.grad = None
        (weight * (context.replica_id_in_sync_group + 1)).backward()
        assert weight.grad is not None
        return sum_of_ranks(), float(context.all_reduce("SUM", 5.0)), weight.grad.item()

    assert two.run(opens).values == (True, True)
    for _ in range(2):
        assert [each.values for each in two.run(both)] == [(3.0, 3.0), (10.0, 10.0), (1.5, 1.5)]


def test_it_outlives_a_step_that_fails(two: rd.MirroredStrategy, opens: Callable[..., bool]) -> None:
    def fail() -> int:
        context = rd.get_replica_context()
        if context.replica_id_in_sync_group == 1:
            raise KeyError("on purpose")
        return int(context.all_reduce("SUM", 1))

    assert two.run(opens).values == (True, True)
    with pytest.raises(KeyError, match="on purpose"):
        two.local_results(two.run(fail))
    assert two.run(sum_of_ranks).values == (3.0, 3.0)
    assert two.run(lambda: float(rd.get_replica_context().all_reduce("SUM", 1.0))).values == (2.0, 2.0)


def test_nothing_of_it_is_left_once_a_step_has_closed_it(two: rd.MirroredStrategy, opens: Callable[..., bool]) -> None:
    def extents() -> list[int]:
        return [number for counts in two.run(extent) for number in counts.values]

    assert two.run(opens).values == (True, True)  # torch starts some threads that it keeps
    assert two.run(close_group).values == (True, True)
    before = extents()
    for number in range(1, GROUPS + 1):
        assert two.run(opens, args=(number,)).values == (True, True)
        assert two.run(sum_of_ranks).values == (3.0, 3.0)
        assert two.run(close_group).values == (True, True)
    deadline = time.monotonic() + 10
    while any(now >= then + GROUPS for now, then in zip(extents(), before, strict=True)):
        assert time.monotonic() < deadline, (before, extents())
        time.sleep(0.1)
