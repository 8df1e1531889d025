from __future__ import annotations

from collections.abc import Callable

import pytest

from raydist.context.current import current, enter_replica, has_strategy, in_cross_replica_context
from raydist.context.strategy import Strategy
from raydist.errors import FailedPreconditionError
from raydist.strategies.default import get_replica_context
from raydist.strategies.mirrored import MirroredStrategy
from raydist.strategies.one_device import OneDeviceStrategy
from raydist.strategies.parameter_server import ParameterServerStrategy


def test_outside_nothing_is_open() -> None:
    assert current() is None
    assert not has_strategy()
    assert not in_cross_replica_context()


def test_the_scope_is_the_cross_replica_context() -> None:
    strategy = OneDeviceStrategy()
    with strategy.scope(), strategy.scope():
        assert in_cross_replica_context()
        assert current() is strategy
    assert not has_strategy()


def test_run_is_the_replica_context() -> None:
    strategy = OneDeviceStrategy()

    def step() -> tuple[int, bool, bool]:
        return get_replica_context().replica_id_in_sync_group, in_cross_replica_context(), has_strategy()

    assert strategy.run(step) == (0, False, True)


def test_scopes_of_two_strategies_do_not_nest() -> None:
    with OneDeviceStrategy().scope(), pytest.raises(FailedPreconditionError, match="must be left before another"):
        OneDeviceStrategy().scope().__enter__()


def test_a_scope_is_not_entered_in_a_run() -> None:
    strategy = OneDeviceStrategy()
    with pytest.raises(FailedPreconditionError, match="entered by the driver.*inside of strategy.run"):
        strategy.run(lambda: strategy.scope().__enter__())


def test_run_does_not_nest() -> None:
    strategy = OneDeviceStrategy()
    with pytest.raises(FailedPreconditionError, match="not inside of another run"):
        strategy.run(lambda: strategy.run(lambda: None))


@pytest.mark.parametrize("make", [lambda: MirroredStrategy(2), lambda: ParameterServerStrategy(2, 1)])
def test_run_of_another_strategy_does_not_nest_either(make: Callable[[], Strategy]) -> None:
    with pytest.raises(FailedPreconditionError, match="not inside of another run"):
        OneDeviceStrategy().run(lambda: make().run(lambda: None))


def test_a_run_is_left_with_its_error() -> None:
    with pytest.raises(KeyError, match="mine"), enter_replica(object()):
        raise KeyError("mine")
    assert current() is None
