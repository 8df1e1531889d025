from __future__ import annotations

from typing import Any

import pytest
import torch
from torchmetrics import MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy

import raydist as rd
from raydist.training.callbacks.monitor import Monitor


class Undecided(MeanSquaredError):
    higher_is_better: Any = None


METRICS: dict[str, Any] = {"accuracy": MulticlassAccuracy(3), "error": MeanSquaredError(), "odd": Undecided()}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("loss", "min"),
        ("val_loss", "min"),
        ("val_accuracy", "max"),
        ("accuracy", "max"),
        ("error", "min"),
        ("x", "min"),
    ],
)
def test_auto_asks_the_metric(name: str, expected: str) -> None:
    assert Monitor(name).direction(lambda: METRICS) == expected


def test_a_metric_that_does_not_say_must_be_decided() -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"which direction of 'val_odd' is better.*Give mode="):
        Monitor("val_odd", owner="EarlyStopping").improves(1.0, lambda: METRICS, 2.0)
    assert Monitor("val_odd", "max").direction(lambda: METRICS) == "max"


@pytest.mark.parametrize(
    ("mode", "delta", "value", "expected"),
    [
        ("min", 0.0, 0.9, True),
        ("min", 0.0, 1.0, False),
        ("min", 0.2, 0.9, False),
        ("max", 0.0, 1.1, True),
        ("max", 0.2, 1.1, False),
        ("max", 0.0, float("nan"), False),
        ("min", 0.0, float("nan"), False),
    ],
)
def test_better_is_better_by_more_than_min_delta(mode: Any, delta: float, value: float, expected: bool) -> None:
    monitor = Monitor("loss", mode, delta)
    assert monitor.improves(value, dict) is (value == value)  # the first number is better than none
    monitor.best = 1.0
    assert monitor.improves(value, dict) is expected


def test_a_value_must_be_one_number() -> None:
    monitor = Monitor("map", owner="EarlyStopping")
    assert monitor.value({"map": torch.tensor([2.5])}) == 2.5
    with pytest.warns(UserWarning, match="not among the logs"):
        assert monitor.value({}) is None
    with pytest.raises(rd.InvalidArgumentError, match="EarlyStopping must monitor a single number"):
        monitor.value({"map": torch.ones(2)})


def test_restarting_forgets_all_but_the_threshold() -> None:
    monitor = Monitor("loss", threshold=0.5)
    monitor.best = 0.1
    monitor.restart()
    assert monitor.best == 0.5
