from __future__ import annotations

from typing import Any

import pytest

from raydist.training.resuming.fit_state import FitState
from raydist.training.resuming.keeping import Keeper, Keepers


class Noting(Keeper):
    """Writes down what it is told."""

    def __init__(self, found: str | None, calls: list[Any]) -> None:
        self._found = found
        self._calls = calls

    def restore(self) -> str | None:
        self._calls.append(("restore", self._found))
        return self._found

    def after_execution(self, num_batches: int) -> None:
        self._calls.append(num_batches)

    def after_epoch(self, logs: dict[str, Any]) -> None:
        self._calls.append(logs)

    def finish(self) -> None:
        self._calls.append("finish")


def test_the_first_with_a_checkpoint_restores() -> None:
    calls: list[Any] = []
    keepers = Keepers([Noting(None, calls), Noting("a", calls), Noting("b", calls)], FitState())
    assert keepers.restore()
    keepers.restore_again()
    assert calls == [("restore", None), ("restore", "a"), ("restore", "a")]


def test_without_any_nothing_is_restored() -> None:
    keepers = Keepers([Noting(None, [])], FitState())
    assert not keepers.restore()
    keepers.restore_again()


def test_all_are_told() -> None:
    calls: list[Any] = []
    keepers = Keepers([Noting(None, calls), Noting(None, calls)], FitState())
    keepers.after_execution(2)
    keepers.after_epoch({"loss": 0.5})
    keepers.finish()
    assert calls == [2, 2, {"loss": 0.5}, {"loss": 0.5}, "finish", "finish"]


@pytest.mark.parametrize(("stop", "why"), [(True, "was stopped then"), (False, r"ends there \(epochs=3\)")])
def test_it_says_that_nothing_is_left(stop: bool, why: str) -> None:
    state = FitState()
    state.epoch, state.stop = 3, stop
    with pytest.warns(UserWarning, match=rf"the end of epoch 3, and training {why}. Give a larger number"):
        Keepers([], state).say_nothing_is_left(3)
