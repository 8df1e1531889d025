from __future__ import annotations

from raydist.strategies.default import get_replica_context, get_strategy
from raydist.strategies.one_device import OneDeviceStrategy


def test_outside_there_is_one_replica_on_the_cpu() -> None:
    assert isinstance(get_strategy(), OneDeviceStrategy)
    assert get_strategy().worker_devices == ("CPU:0",)
    assert get_replica_context().num_replicas_in_sync == 1


def test_a_scope_has_a_strategy_and_no_replica() -> None:
    strategy = OneDeviceStrategy()
    with strategy.scope():
        assert get_strategy() is strategy
        assert [get_replica_context()] == [None]


def test_a_run_has_both() -> None:
    strategy = OneDeviceStrategy()
    assert strategy.run(lambda: get_strategy() is strategy and get_replica_context().strategy is strategy)
