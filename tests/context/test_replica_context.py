"""Replica contexts, and a replica without peers."""

from __future__ import annotations

import torch

import raydist as rd
from raydist.context.replica_context import NoPeers
from raydist.core.values import ReduceOp


def test_collectives_of_the_only_replica_are_the_identity() -> None:
    context = rd.get_replica_context()
    assert context.all_reduce("SUM", {"a": 3.0})["a"].item() == 3.0
    assert context.all_reduce(rd.ReduceOp.MEAN, torch.tensor(3)).dtype is torch.float32
    assert context.all_gather(torch.tensor([1, 2])).tolist() == [1, 2]
    assert context.merge_call(lambda strategy, x: x + 1, args=(1,)) == 2
    with context.no_sync():
        assert context.num_rows is None
        assert context.global_num_rows is None


def test_a_merged_function_is_given_the_strategy_first() -> None:
    strategy = rd.OneDeviceStrategy()

    def merged(given: rd.Strategy, x: int, *, by: int) -> tuple[bool, int]:
        return given is strategy, x + by

    assert strategy.run(lambda: rd.get_replica_context().merge_call(merged, (1,), {"by": 2})) == (True, 3)


def test_alone_every_collective_is_the_identity() -> None:
    alone = NoPeers(torch.device("cpu"))
    assert alone.all_reduce(ReduceOp.SUM, 3).item() == 3
    assert alone.all_reduce(ReduceOp.MEAN, 3).dtype == torch.float32
    assert alone.all_gather(torch.tensor([1, 2]), 0).tolist() == [1, 2]
    assert alone.merge_call(lambda x, *, by: x + by, (1,), {"by": 1}) == 2
    with alone.no_sync():
        assert alone.rows is None
