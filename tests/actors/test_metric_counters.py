from __future__ import annotations

import pytest

from raydist.actors import metric_counters
from raydist.actors.metric_counters import MetricCounters


class Counter:
    made: list[Counter] = []

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self.name, self.description, self.tag_keys = name, description, tag_keys
        self.told: list[tuple[float, dict[str, str]]] = []
        Counter.made.append(self)

    def inc(self, amount: float, tags: dict[str, str]) -> None:
        self.told.append((amount, tags))


def test_a_counter_exists_once_there_is_something_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_counters, "Counter", Counter)
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr(Counter, "made", [])
    counters = MetricCounters({"raydist_steps": "Steps.", "raydist_rows": "Rows."}, {"strategy": "mirrored"})
    counters.raise_by({"raydist_steps": 2, "raydist_rows": 0})
    counters.raise_by({"raydist_steps": 3})
    (only,) = Counter.made
    assert (only.name, only.description, only.tag_keys) == ("raydist_steps", "Steps.", ("strategy",))
    assert only.told == [(2, {"strategy": "mirrored"}), (3, {"strategy": "mirrored"})]


def test_without_ray_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_counters, "Counter", None)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    MetricCounters({"raydist_steps": "Steps."}, {}).raise_by({"raydist_steps": 2})
