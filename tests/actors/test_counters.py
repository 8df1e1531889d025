"""The counters for Ray's metrics: of training, saves, input pipelines and parameter servers."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import pytest

import raydist as rd
from raydist.actors import metric_counters, parameter_servers
from raydist.actors.epochs.input_pipeline import InputMetrics
from raydist.actors.metric_counters import MetricCounters, SaveMetrics, TrainingMetrics
from raydist.actors.parameter_servers import ServerMetrics, staleness_bucket
from raydist.parameter_servers.requests import ServerStats


class Metric:
    """A counter or gauge of Ray's that keeps its totals by tags."""

    made: dict[str, Metric] = {}

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        assert description
        self.keys = tag_keys
        self.totals: collections.Counter[tuple[str, ...]] = collections.Counter()
        Metric.made[name] = self

    def inc(self, amount: float, tags: Mapping[str, str]) -> None:
        assert amount > 0
        self.totals[tuple(tags[key] for key in self.keys)] += amount  # type: ignore[assignment]  # a float

    def set(self, value: float, tags: Mapping[str, str]) -> None:
        self.totals = collections.Counter({tuple(tags.values()): value})


@pytest.fixture(autouse=True)
def metrics_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Metric, "made", {})
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    for module, name in ((metric_counters, "Counter"), (parameter_servers, "Counter"), (parameter_servers, "Gauge")):
        monkeypatch.setattr(module, name, Metric)


def test_a_counter_exists_once_there_is_something_to_count() -> None:
    counters = MetricCounters({"raydist_steps": "Steps.", "raydist_rows": "Rows."}, {"strategy": "mirrored"})
    counters.raise_by({"raydist_steps": 2, "raydist_rows": 0})
    counters.raise_by({"raydist_steps": 3})
    assert {name: dict(metric.totals) for name, metric in Metric.made.items()} == {"raydist_steps": {("mirrored",): 5}}


def test_counters_of_a_server_rise_by_what_has_come() -> None:
    metrics = ServerMetrics("mine", "parameter server 0")
    metrics.update(ServerStats(0, pulls=3, pushes=2, bytes_held=10, staleness={0: 1, 3: 1}))
    metrics.update(ServerStats(0, pulls=5, pushes=2, bytes_held=8, staleness={0: 1, 2: 4, 3: 2}))
    told = {name.removeprefix("raydist_parameter_server_"): metric.totals for name, metric in Metric.made.items()}
    server = ("mine", "parameter server 0")
    assert [told[name][server] for name in ("pulls", "pushes", "bytes_held", "late")] == [5, 2, 8, 0]
    assert told["staleness"] == {(*server, "0"): 1, (*server, "2-3"): 6}
    assert [staleness_bucket(number) for number in (-1, 0, 1, 2, 15, 16)] == ["0", "0", "1", "2-3", "8-15", "16-31"]


class Taken:
    """Counters that keep what they were told, and a gauge."""

    def __init__(self) -> None:
        self.told: list[dict[str, float]] = []
        self.fills: dict[str, float] = {}

    def raise_by(self, amounts: Mapping[str, float]) -> None:
        self.told.append(dict(amounts))

    def set(self, value: float, tags: Mapping[str, str]) -> None:
        self.fills[tags["stage"]] = value

    def total(self, name: str) -> float:
        return sum(amounts.get(name, 0.0) for amounts in self.told)


def test_training_is_told_once_in_some_seconds_and_at_the_end_and_every_save() -> None:
    taken, time = Taken(), [0.0]
    metrics = TrainingMetrics("mirrored", taken, lambda: time[0])
    metrics.step_ended(4)
    metrics.step_ended(2)
    assert taken.told == []
    time[0] = 5.0
    metrics.step_ended(4)
    metrics.step_ended(4)
    metrics.publish()
    SaveMetrics("somewhere", taken).note_save(0.25)
    assert taken.told == [
        {"raydist_steps": 3, "raydist_examples": 10},
        {"raydist_steps": 1, "raydist_examples": 4},
        {"raydist_checkpoints": 1, "raydist_checkpoint_pause_seconds": 0.25},
    ]


def stats_after(batches: int) -> rd.PipelineStats:
    data = rd.Dataset.range(2 * batches).batch(2).prefetch(2)
    list(data)
    return data.stats()


def test_each_epoch_counts_what_it_has_done_since() -> None:
    taken: Any = Taken()
    metrics = InputMetrics("input", taken, taken)
    metrics.update("a", stats_after(3), 0.5)
    metrics.update("a", stats_after(5), 0.75)
    metrics.update("b", stats_after(2), 1.0)
    assert taken.total("raydist_input_batches") == 7
    assert taken.total("raydist_input_bytes") == taken.total("raydist_input_bytes_here") == 7 * 16
    assert taken.total("raydist_input_wait_seconds") == 1.75
    assert taken.fills.keys() == {"prefetch-2"}
    metrics.forget("a")
    metrics.update("a", stats_after(1), 0.0)
    assert taken.total("raydist_input_batches") == 8
