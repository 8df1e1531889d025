from __future__ import annotations

from typing import Any

import pytest

import raydist as rd
from raydist.training.resuming.fit_state import FitState
from tests.training.toys import regression


class Count(rd.Callback):
    """Counts from a number on."""

    def __init__(self, number: int) -> None:
        self.number = number

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


class Other(rd.Callback):
    pass


def test_it_goes_on_where_another_was() -> None:
    state = FitState()
    state.epoch, state.batches, state.saw_data = 2, 5, True
    state.end_training({"loss": 0.5})
    again = FitState()
    again.load_state_dict(state.state_dict())
    assert again.state_dict() == state.state_dict()
    assert again.is_within_epoch
    again.end_epoch({"loss": 0.5, "val_loss": 1.0})
    assert (again.epoch, again.batches, again.logs, again.is_within_epoch) == (3, 0, None, False)
    assert again.last_logs == {"loss": 0.5, "val_loss": 1.0}


def test_callbacks_take_the_state_of_their_like() -> None:
    saved = FitState([Count(1), Other(), Count(2)]).state_dict()
    fresh = [Other(), Count(0), Count(0), Count(7)]
    FitState(fresh).load_state_dict(saved)
    assert [one.number for one in fresh if isinstance(one, Count)] == [1, 2, 7]


def test_a_validation_that_is_interrupted_begins_anew() -> None:
    held_out = rd.OneDeviceStrategy("cpu").distribute_dataset(regression(8, 4))
    state = FitState([], held_out)
    state.end_training({"loss": 0.5})
    iterator = iter(held_out)
    next(iterator)
    saved = state.state_dict()
    assert saved["held_out"]["epochs"] == 0
    state.end_epoch({"loss": 0.5})
    for _ in iterator:
        pass
    assert state.state_dict()["held_out"]["epochs"] == 1
    FitState([], held_out).load_state_dict(saved)
    assert len(list(held_out)) == 2


def test_a_state_of_another_version_is_refused() -> None:
    with pytest.raises(rd.InvalidArgumentError, match="must be of version 1, got 2"):
        FitState().load_state_dict({"version": 2})


class Renamed(Count):
    pass


def test_a_callback_that_was_renamed_is_told_of() -> None:
    saved = FitState([Count(1), Count(2)]).state_dict()
    with pytest.warns(UserWarning, match="states of the callbacks Count, and Renamed begin anew.*Was one renamed"):
        FitState([Count(0), Renamed(0)]).load_state_dict(saved)
    FitState([Count(0)]).load_state_dict(saved)  # one was taken out
    FitState([Count(0), Count(0), Renamed(0)]).load_state_dict(saved)  # one came in


def test_callbacks_are_not_asked_before_training_begins() -> None:
    saved = FitState([Count(1)]).state_dict()
    count = Count(7)
    state = FitState([count])
    with state.without_callbacks():
        assert state.state_dict()["callbacks"] == []
        state.load_state_dict(saved)
        assert count.number == 7
    state.load_state_dict(saved)
    assert count.number == 1
