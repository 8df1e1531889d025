"""The current context, global steps, and the strategies of a process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import raydist as rd
from raydist.context import current as module
from raydist.context.current import (
    StepCounter,
    current,
    has_strategy,
    in_cross_replica_context,
    open_strategies,
    training_strategy,
)
from raydist.context.strategy import Strategy
from raydist.core.errors import FailedPreconditionError
from raydist.strategies.one_device import OneDeviceStrategy
from raydist.strategies.one_node import MirroredStrategy
from raydist.strategies.parameter_server import ParameterServerStrategy


def test_the_scope_is_the_cross_replica_context() -> None:
    strategy = OneDeviceStrategy()
    with strategy.scope(), strategy.scope():
        assert in_cross_replica_context()
        assert current() is strategy
    assert not has_strategy()
    assert not in_cross_replica_context()
    assert current() is None


def test_scopes_of_two_strategies_do_not_nest() -> None:
    with OneDeviceStrategy().scope(), pytest.raises(FailedPreconditionError, match="must be left before another"):
        OneDeviceStrategy().scope().__enter__()


def test_a_scope_is_not_entered_in_a_run() -> None:
    strategy = OneDeviceStrategy()
    with pytest.raises(FailedPreconditionError, match="entered by the driver.*inside of strategy.run"):
        strategy.run(lambda: strategy.scope().__enter__())


@pytest.mark.parametrize("make", [lambda: MirroredStrategy(2), lambda: ParameterServerStrategy(2, 1)])
def test_run_of_another_strategy_does_not_nest_either(make: Callable[[], Strategy]) -> None:
    with pytest.raises(FailedPreconditionError, match="not inside of another run"):
        OneDeviceStrategy().run(lambda: make().run(lambda: None))


@dataclass
class Made:
    """A strategy."""

    _closed: bool = False
    _is_default: bool = False
    made: tuple[object, ...] = ()

    def _has_made(self, obj: Any) -> bool:
        return obj in self.made

    def _find_counter(self) -> StepCounter | None:
        return None

    def _make_counter(self) -> StepCounter:
        return StepCounter()

    def _find_restorer(self) -> None:
        return None


class Living(list[Any]):
    """Those of a process."""

    add = list.append


def living(monkeypatch: pytest.MonkeyPatch, *strategies: Made) -> None:
    found = Living(strategies)
    monkeypatch.setattr(module, "_living", lambda: found)


def test_the_only_one_that_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Made()
    living(monkeypatch, Made(_closed=True), one, Made(_is_default=True))
    assert training_strategy() is one
    assert open_strategies() == [one]


def test_none_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    living(monkeypatch, Made(), Made())
    assert training_strategy() is None
    living(monkeypatch)
    assert training_strategy() is None


def test_the_one_that_made_the_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    one, closed, other = Made(made=(1, 2)), Made(_closed=True, made=(3,)), Made()
    living(monkeypatch, one, closed, other)
    assert training_strategy([7, 2]) is one
    assert training_strategy([3]) is closed
    assert training_strategy([1, 3]) is None
    assert training_strategy([7]) is None
    with (scope := rd.OneDeviceStrategy("cpu")).scope():
        assert training_strategy([1]) is scope


def test_strategies_are_known_as_long_as_they_live() -> None:
    strategy = rd.OneDeviceStrategy("cpu")
    assert strategy in module._living()
    number = len(module._living())
    del strategy
    gc.collect()
    assert len(module._living()) < number
