from __future__ import annotations

import pytest
import torch

import raydist as rd
from raydist.context.replica_context import (
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from raydist.errors import FailedPreconditionError
from raydist.strategies.one_device import OneDeviceStrategy


def test_outside_there_is_one_replica_and_no_strategy() -> None:
    assert not has_strategy()
    assert not in_cross_replica_context()
    assert isinstance(get_strategy(), OneDeviceStrategy)
    assert get_replica_context().num_replicas_in_sync == 1


def test_the_scope_is_the_cross_replica_context() -> None:
    strategy = OneDeviceStrategy()
    with strategy.scope(), strategy.scope():
        assert in_cross_replica_context()
        assert get_strategy() is strategy
        assert [get_replica_context()] == [None]
    assert not has_strategy()


def test_run_is_the_replica_context() -> None:
    strategy = OneDeviceStrategy()

    def step() -> tuple[int, bool, bool]:
        return get_replica_context().replica_id_in_sync_group, in_cross_replica_context(), get_strategy() is strategy

    assert strategy.run(step) == (0, False, True)


def test_scopes_of_two_strategies_do_not_nest() -> None:
    with OneDeviceStrategy().scope(), pytest.raises(FailedPreconditionError, match="must be left before another"):
        OneDeviceStrategy().scope().__enter__()


def test_run_does_not_nest() -> None:
    strategy = OneDeviceStrategy()
    with pytest.raises(FailedPreconditionError, match="not inside of another run"):
        strategy.run(lambda: strategy.run(lambda: None))


def test_collectives_of_the_only_replica_are_the_identity() -> None:
    context = get_replica_context()
    assert context.all_reduce("SUM", {"a": 3.0})["a"].item() == 3.0
    assert context.all_reduce(rd.ReduceOp.MEAN, torch.tensor(3)).dtype is torch.float32
    assert context.all_gather(torch.tensor([1, 2])).tolist() == [1, 2]
    assert context.merge_call(lambda strategy, x: x + 1, args=(1,)) == 2
    with context.no_sync():
        assert context.num_rows is None
