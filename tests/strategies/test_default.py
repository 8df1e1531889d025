from __future__ import annotations

import pytest
import torch

from raydist.errors import InvalidArgumentError
from raydist.options import RunOptions
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


def test_the_strategy_outside_of_every_scope_runs_whatever_it_is_given() -> None:
    layer = torch.nn.Linear(1, 1)
    assert get_strategy().run(lambda: layer(torch.ones(1, 1)).shape) == (1, 1)


def test_it_checks_no_gradients() -> None:
    with pytest.raises(InvalidArgumentError, match="needs a strategy whose scope has made the model"):
        get_strategy().run(lambda: None, options=RunOptions(on_nonfinite="raise"))
