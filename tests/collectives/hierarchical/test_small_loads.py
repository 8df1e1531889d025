from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from raydist.collectives.hierarchical.lane import HostReduction
from raydist.collectives.hierarchical.plan import HostPlan
from raydist.collectives.hierarchical.small_loads import SmallBroadcast, SmallGather, SmallLoad, SmallReduction
from raydist.values import ReduceOp

HOSTS = ((0, 2), (1, 3, 4))
PLANS = [HostPlan(HOSTS, host, 0) for host in range(len(HOSTS))]


def concluded(make: Callable[[HostPlan], SmallLoad]) -> list[torch.Tensor]:
    """What each leader makes of what all bring."""
    loads = [make(plan) for plan in PLANS]
    parts = []
    for load in loads:
        parts.append(torch.empty(load.num_bytes // load.dtype.itemsize, dtype=load.dtype))
        load.bring(parts[-1])
    results = [torch.empty(load.numel, dtype=load.dtype) for load in loads]
    for load, result in zip(loads, results, strict=True):
        load.conclude(parts, result)
    return results


def rows_of(plan: HostPlan, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rank r brings r + 1, over and over."""
    return torch.stack([torch.full((size,), rank + 1, dtype=dtype) for rank in plan.members])


@pytest.mark.parametrize(
    ("op", "expected"), [(ReduceOp.SUM, 15.0), (ReduceOp.MEAN, 3.0), (ReduceOp.MAX, 5.0), (ReduceOp.PRODUCT, 120.0)]
)
def test_a_reduction_is_one_of_all_ranks(op: ReduceOp, expected: float) -> None:
    reduction = HostReduction(op, world_size=5)
    results = concluded(
        lambda plan: SmallReduction(torch.empty(6), reduction, lambda: rows_of(plan, 6, torch.float32), place=None)
    )
    assert [result.tolist() for result in results] == [[expected] * 6] * 2


@pytest.mark.parametrize("root", range(5))
def test_a_broadcast_is_brought_by_the_host_of_the_root_alone(root: int) -> None:
    results = concluded(
        lambda plan: SmallBroadcast(plan, 4, root, lambda: rows_of(plan, 4, torch.uint8)[plan.members.index(root)])
    )
    assert [result.tolist() for result in results] == [[root + 1] * 4] * 2


def test_a_gathering_is_in_the_order_of_hosts() -> None:
    results = concluded(lambda plan: SmallGather(plan, 2, lambda: rows_of(plan, 2, torch.uint8)))
    assert [result.tolist() for result in results] == [[1, 1, 3, 3, 2, 2, 4, 4, 5, 5]] * 2


def test_nothing_is_gathered_of_nothing() -> None:
    assert [
        result.numel() for result in concluded(lambda plan: SmallGather(plan, 0, lambda: torch.empty(2, 0)[:0]))
    ] == [0, 0]
