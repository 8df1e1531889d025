from __future__ import annotations

from typing import Any

import pytest

import raydist as rd
from tests.training.callbacks.scripted import history_of


def test_the_schedule_sets_the_rate_of_each_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    schedule = rd.LearningRateScheduler(lambda epoch, rate: rate if epoch < 1 else rate / 4, verbose=1)
    assert history_of([0.0] * 3, schedule)["learning_rate"] == [1.0, 0.25, 0.0625]
    assert capsys.readouterr().out.splitlines()[1] == "Epoch 2: LearningRateScheduler setting learning rate to 0.25."


def test_the_schedule_must_be_a_function() -> None:
    schedule: Any = 0.1
    with pytest.raises(rd.InvalidArgumentError, match="schedule must be a function of epoch and rate, got 0.1"):
        rd.LearningRateScheduler(schedule)
