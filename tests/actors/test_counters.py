from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

import raydist as rd
from raydist.actors import metric_counters
from raydist.actors import parameter_servers as module
from raydist.actors.epochs.input_pipeline import InputMetrics
from raydist.actors.metric_counters import MetricCounters, SaveMetrics, TrainingMetrics
from raydist.actors.parameter_servers import ServerMetrics, staleness_bucket
from raydist.parameter_servers.requests import ServerStats


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


# --- training metrics -------------------------------------------------------------------------------------------------


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


# --- server metrics ---------------------------------------------------------------------------------------------------


class Told:
    """A metric that keeps what it was told."""

    made: ClassVar[dict[str, Told]] = {}

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self.total = 0.0
        self.by_tags: dict[tuple[str, ...], float] = {}
        assert description
        self.keys = tag_keys
        Told.made[name.removeprefix("raydist_parameter_server_")] = self

    def inc(self, by: float, tags: dict[str, str]) -> None:
        assert by > 0
        assert set(tags) == set(self.keys)
        self.total += by
        place = tuple(tags.values())
        self.by_tags[place] = self.by_tags.get(place, 0) + by

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.total = value


def test_counters_rise_by_what_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Counter", Told)
    monkeypatch.setattr(module, "Gauge", Told)
    metrics: Any = ServerMetrics("mine", "parameter server 0")
    metrics.update(ServerStats(0, pulls=3, pushes=2, bytes_held=10, staleness={0: 1, 3: 1}))
    metrics.update(ServerStats(0, pulls=5, pushes=2, bytes_held=8, staleness={0: 1, 2: 4, 3: 2}))
    told = {name: metric.total for name, metric in Told.made.items()}
    assert (told["pulls"], told["pushes"], told["bytes_held"], told["late"]) == (5, 2, 8, 0)
    assert Told.made["staleness"].by_tags == {
        ("mine", "parameter server 0", "0"): 1,
        ("mine", "parameter server 0", "2-3"): 6,
    }


def test_buckets_double() -> None:
    assert [staleness_bucket(number) for number in (-1, 0, 1, 2, 15, 16)] == ["0", "0", "1", "2-3", "8-15", "16-31"]


# --- what a save adds to the counters ---------------------------------------------------------------------------------


class Counts:
    def __init__(self) -> None:
        self.found: collections.Counter[str] = collections.Counter()

    def raise_by(self, amounts: dict[str, float]) -> None:
        self.found.update(amounts)


def test_saves_and_their_pauses_are_counted() -> None:
    counts = Counts()
    metrics = SaveMetrics("somewhere", counts)
    metrics.note_save(0.25)
    metrics.note_save(0.5)
    assert counts.found == {"raydist_checkpoints": 2, "raydist_checkpoint_pause_seconds": 0.75}


# --- input metrics ----------------------------------------------------------------------------------------------------


class Taken:
    def __init__(self) -> None:
        self.total: collections.Counter[str] = collections.Counter()
        self.fills: dict[str, float] = {}

    def raise_by(self, amounts: Mapping[str, float]) -> None:
        self.total.update(amounts)

    def set(self, value: float, tags: Mapping[str, str]) -> None:
        self.fills[tags["stage"]] = value


def stats_after(batches: int) -> rd.PipelineStats:
    data = rd.Dataset.range(2 * batches).batch(2).prefetch(2)
    list(data)
    return data.stats()


def test_each_pass_counts_what_it_has_done_since() -> None:
    taken = Taken()
    metrics = InputMetrics("input", taken, taken)
    metrics.update("a", stats_after(3), 0.5)
    metrics.update("a", stats_after(5), 0.75)
    metrics.update("b", stats_after(2), 1.0)
    assert taken.total["raydist_input_batches"] == 7
    assert taken.total["raydist_input_bytes"] == taken.total["raydist_input_bytes_here"] == 7 * 16
    assert taken.total["raydist_input_wait_seconds"] == 1.75
    assert taken.fills.keys() == {"prefetch-2"}
    metrics.forget("a")
    metrics.update("a", stats_after(1), 0.0)
    assert taken.total["raydist_input_batches"] == 8
