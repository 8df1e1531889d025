from __future__ import annotations

import pytest
import torch

from raydist.training.display.progress import ProgressMeter, Report, duration


def test_rate_and_time_left_follow_the_last_seconds() -> None:
    meter = ProgressMeter("Epoch 1/1", 100, now=0.0)
    slow = meter.report(10.0, 10, 1000, {})
    assert (slow.rate, slow.left_s) == (100.0, 90.0)
    fast = meter.report(20.0, 60, 6000, {})
    assert (fast.rate, fast.left_s) == (500.0, 8.0)


def test_the_last_report_has_the_rate_of_the_whole_pass() -> None:
    meter = ProgressMeter("Epoch 1/1", None, now=5.0)
    meter.report(10.0, 1, 10, {})
    last = meter.finished(25.0, 4, 400)
    assert (last.rate, last.elapsed_s, last.left_s, last.total, last.done) == (20.0, 20.0, None, 4, True)


def test_without_a_total_or_a_step_the_time_left_is_not_known() -> None:
    assert ProgressMeter("", None, 0.0).report(1.0, 5, 50, {}).left_s is None
    assert ProgressMeter("", 10, 0.0).report(1.0, 0, 0, {}).left_s is None
    assert ProgressMeter("", 10, 0.0).report(0.0, 1, 1, {}).rate is None


def test_more_steps_than_expected_leave_no_negative_time() -> None:
    assert ProgressMeter("", 3, 0.0).report(1.0, 5, 5, {}).left_s == 0.0


def test_a_line_says_all() -> None:
    logs = {"loss": 0.12345, "accuracy": 0.5, "tiny": 1e-7, "per_class": torch.ones(3), "name": "a"}
    report = Report("Epoch 2/3", 5, 20, 4321.0, 10.0, 125.0, logs)
    assert report.line == (
        "Epoch 2/3  5/20 steps  4,321 examples/s  loss 0.1235  accuracy 0.5000  tiny 1e-07  "
        "per_class <3 values>  name a  0:02:05 left"
    )


def test_a_line_of_a_pass_that_is_over() -> None:
    assert Report("Evaluate", 4, 4, 2.5, 1.5, None, {"loss": 0.0}, done=True).line == (
        "Evaluate  4/4 steps  2.50 examples/s  loss 0.0000  in 1.5 s"
    )
    assert Report("Predict", 4, None, None, 1.5, None).line == "Predict  4 steps"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0.0 s"), (59.94, "59.9 s"), (59.96, "0:01:00"), (3599.6, "1:00:00"), (90061, "25:01:01")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
