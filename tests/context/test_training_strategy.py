from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import pytest

import raydist as rd
from raydist.context import training_strategy as module
from raydist.context.step_counter import StepCounter
from raydist.context.training_strategy import open_strategies, training_strategy


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


def test_all_that_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Made(), Made()
    living(monkeypatch, Made(_closed=True), one, Made(_is_default=True), other)
    assert open_strategies() == [one, other]


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


def test_that_of_the_open_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    living(monkeypatch, Made())
    strategy = rd.OneDeviceStrategy("cpu")
    with strategy.scope():
        assert training_strategy() is strategy


def test_strategies_are_known_as_long_as_they_live() -> None:
    strategy = rd.OneDeviceStrategy("cpu")
    assert strategy in module._living()
    number = len(module._living())
    del strategy
    gc.collect()
    assert len(module._living()) < number
