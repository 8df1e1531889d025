"""The counters for Ray's metrics: of training, saves, input pipelines and parameter servers."""

from __future__ import annotations

import collections
from collections.abc import Mapping

import pytest

import raydist as rd
from raydist.actors import metric_counters, parameter_servers
from raydist.actors.epochs import input_pipeline
from raydist.actors.epochs.input_pipeline import InputMetrics
from raydist.actors.metric_counters import SaveMetrics, TrainingMetrics
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
        self.totals[tuple(tags.values())] = value  # type: ignore[assignment]  # a float


@pytest.fixture(autouse=True)
def metrics_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Metric, "made", {})
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    for module, name in (
        *((metric_counters, "Counter"), (parameter_servers, "Counter")),
        *((parameter_servers, "Gauge"), (input_pipeline, "Gauge")),
    ):
        monkeypatch.setattr(module, name, Metric)


def totals() -> dict[str, float]:
    """Of all tags together, of the counters that there are."""
    return {name.removeprefix("raydist_"): metric.totals.total() for name, metric in Metric.made.items()}


def test_counters_of_a_server_rise_by_what_has_come() -> None:
    metrics = ServerMetrics("mine", "parameter server 0")
    metrics.update(ServerStats(0, pulls=3, pushes=2, bytes_held=10, staleness={0: 1, 3: 1}))
    metrics.update(ServerStats(0, pulls=5, pushes=2, bytes_held=8, staleness={0: 1, 2: 4, 3: 2}))
    told = {name.removeprefix("raydist_parameter_server_"): metric.totals for name, metric in Metric.made.items()}
    server = ("mine", "parameter server 0")
    assert [told[name][server] for name in ("pulls", "pushes", "bytes_held", "late")] == [5, 2, 8, 0]
    assert told["staleness"] == {(*server, "0"): 1, (*server, "2-3"): 6}
    assert [staleness_bucket(number) for number in (-1, 0, 1, 2, 15, 16)] == ["0", "0", "1", "2-3", "8-15", "16-31"]


def test_training_is_told_once_in_some_seconds_and_at_the_end_and_every_save() -> None:
    time = [0.0]
    metrics = TrainingMetrics("mirrored", now=lambda: time[0])
    metrics.step_ended(0)
    metrics.step_ended(0)
    assert totals() == {}
    time[0] = 5.0
    metrics.step_ended(0)
    assert totals() == {"steps": 3}, "a counter exists once there is something to count"
    metrics.step_ended(4)
    metrics.publish()
    assert {name: dict(metric.totals) for name, metric in Metric.made.items()} == {
        "raydist_steps": {("mirrored",): 4},
        "raydist_examples": {("mirrored",): 4},
    }
    metrics.note_recovery(4.5)
    assert (totals()["recoveries"], totals()["recovery_seconds"]) == (1, 4.5)
    SaveMetrics("somewhere").note_save(0.25)
    assert (totals()["checkpoints"], totals()["checkpoint_pause_seconds"]) == (1, 0.25)


def stats_after(batches: int) -> rd.PipelineStats:
    data = rd.Dataset.range(2 * batches).batch(2).prefetch(2)
    list(data)
    return data.stats()


def test_each_epoch_counts_what_it_has_done_since() -> None:
    metrics = InputMetrics("input")
    metrics.update("a", stats_after(3), 0.5)
    metrics.update("a", stats_after(5), 0.75)
    metrics.update("b", stats_after(2), 1.0)
    found = totals()
    assert (found["input_batches"], found["input_wait_seconds"]) == (7, 1.75)
    assert found["input_bytes"] == found["input_bytes_here"] == 7 * 16
    assert Metric.made["raydist_input_queue_fill"].totals.keys() == {("input", "prefetch-2")}
    metrics.forget("a")
    metrics.update("a", stats_after(1), 0.0)
    assert totals()["input_batches"] == 8
