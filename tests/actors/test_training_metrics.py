from __future__ import annotations

from collections.abc import Mapping

from raydist.actors.metric_counters import TrainingMetrics


class Counters:
    def __init__(self) -> None:
        self.told: list[dict[str, float]] = []

    def raise_by(self, amounts: Mapping[str, float]) -> None:
        self.told.append(dict(amounts))


def test_ray_is_told_once_in_some_seconds_and_at_the_end() -> None:
    counters, time = Counters(), [0.0]
    metrics = TrainingMetrics("mirrored", counters, lambda: time[0])
    metrics.step_ended(4)
    metrics.step_ended(2)
    assert counters.told == []
    time[0] = 5.0
    metrics.step_ended(4)
    metrics.step_ended(4)
    metrics.publish()
    assert counters.told == [
        {"raydist_steps": 3, "raydist_examples": 10},
        {"raydist_steps": 1, "raydist_examples": 4},
    ]
