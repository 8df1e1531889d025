from __future__ import annotations

from typing import Any, ClassVar

import pytest

from raydist.actors import parameter_servers as module
from raydist.actors.parameter_servers import ServerMetrics, staleness_bucket
from raydist.parameter_servers.server_stats import ServerStats


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
