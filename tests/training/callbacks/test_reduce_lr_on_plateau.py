from __future__ import annotations

from typing import Any

import pytest

import raydist as rd
from tests.training.callbacks.scripted import history_of


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
