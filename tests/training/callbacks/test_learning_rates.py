"""Learning rates, and the callbacks that change them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import raydist as rd
from raydist.training.callbacks.learning_rates import change_rates, rates_of
from tests.training.callbacks.scripted import history_of


def optimizer(*rates: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates], lr=1.0)


def test_each_group_has_a_rate_of_its_own() -> None:
    both = optimizer(0.5, 0.25)
    assert change_rates(both, lambda rate: rate / 2)
    assert rates_of(both) == [0.25, 0.125]
    assert not change_rates(both, lambda rate: rate)


def test_a_rate_in_a_tensor_stays_one() -> None:
    one = optimizer(torch.tensor(0.5))
    change_rates(one, lambda rate: torch.tensor(2 * rate))
    assert torch.equal(one.param_groups[0]["lr"], torch.tensor(1.0))


@pytest.mark.parametrize("rate", [None, "0.1", True])
def test_a_rate_must_be_a_number(rate: Any) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="A learning rate must be a number, got"):
        change_rates(optimizer(0.5), lambda _: rate)


def test_the_schedule_sets_the_rate_of_each_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    schedule = rd.LearningRateScheduler(lambda epoch, rate: rate if epoch < 1 else rate / 4, verbose=1)
    assert history_of([0.0] * 3, schedule)["learning_rate"] == [1.0, 0.25, 0.0625]
    assert capsys.readouterr().out.splitlines()[1] == "Epoch 2: LearningRateScheduler setting learning rate to 0.25."


def test_the_schedule_must_be_a_function() -> None:
    schedule: Any = 0.1
    with pytest.raises(rd.InvalidArgumentError, match="schedule must be a function of epoch and rate, got 0.1"):
        rd.LearningRateScheduler(schedule)


@pytest.mark.parametrize(
    ("values", "settings", "expected"),
    [
        ([3.0, 2.0, 2.0, 2.0, 1.0], {"patience": 1}, [1, 1, 1, 0.5, 0.25]),
        ([3.0, 2.0, 2.0, 2.0, 1.0], {"patience": 2}, [1, 1, 1, 1, 0.5]),
        ([3.0, 3.0, 3.0, 3.0, 3.0], {"patience": 1, "cooldown": 1}, [1, 1, 0.5, 0.25, 0.125]),
        ([3.0, 3.0, 3.0, 3.0, 3.0], {"patience": 1, "cooldown": 2}, [1, 1, 0.5, 0.5, 0.25]),
        ([3.0, 3.0, 3.0, 3.0, 3.0], {"patience": 1, "min_lr": 0.4}, [1, 1, 0.5, 0.4, 0.4]),
        ([1.0, 2.0, 3.0, 3.0, 3.0], {"patience": 1, "mode": "max"}, [1, 1, 1, 1, 0.5]),
        ([3.0, 2.9, 2.8, 2.7, 2.6], {"patience": 1, "min_delta": 0.15}, [1, 1, 0.5, 0.5, 0.25]),
    ],
)
def test_rates(values: list[float], settings: dict[str, Any], expected: list[float]) -> None:
    reduce = rd.ReduceLROnPlateau("score", factor=0.5, **settings)
    assert history_of(values, reduce)["learning_rate"] == expected


def test_it_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    history_of([1.0, 2.0], rd.ReduceLROnPlateau("score", patience=1, verbose=1))
    assert capsys.readouterr().out == "Epoch 2: ReduceLROnPlateau reducing learning rate to 0.1.\n"


def test_a_missing_value_is_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"ReduceLROnPlateau monitors 'val_loss', which is not among the logs \['lea"):
        history_of([1.0], rd.ReduceLROnPlateau())


def test_its_state_goes_on() -> None:
    first, second = (rd.ReduceLROnPlateau("score", patience=2, cooldown=3) for _ in range(2))
    history_of([1.0, 2.0], first)
    second.load_state_dict(first.state_dict())
    assert (second.wait, second.cooldown_counter, second.state_dict()["best"]) == (1, 0, 1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"factor": 1.0}, "factor must be"), ({"cooldown": -1}, "must be >= 0"), ({"mode": "up"}, "mode must be")],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=message):
        rd.ReduceLROnPlateau(**settings)
