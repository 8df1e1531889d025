"""The benchmark of scaling: what it runs and how it reports. Figures are for `python -m benchmarks.scaling`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import raydist as rd
from benchmarks import scaling
from benchmarks.scaling import Measured, Scene


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The clusters that were asked for; one replica in this process stands for all."""
    clusters = []

    @contextlib.contextmanager
    def cluster_of(nodes: int, replicas: int) -> Iterator[None]:
        clusters.append((nodes, replicas))
        yield

    monkeypatch.setattr(scaling, "cluster_of", cluster_of)
    monkeypatch.setattr(scaling, "strategy_of", lambda scene: rd.OneDeviceStrategy("cpu"))
    return clusters


def test_measures_every_scene_and_says_that_it_is_simulated(
    without_ray: list[tuple[int, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "scaling.json"
    results = scaling.main(["--smoke", "--nodes", "1", "2", "--replicas", "1", "2", "--json", str(file)])
    assert without_ray == [(1, 1), (1, 2), (2, 2)]  # as many replicas on each node
    assert [(it.scene.nodes, it.scene.replicas, it.scene.driven) for it in results] == [
        *((1, 1, "run"), (1, 1, "loop"), (1, 2, "run"), (1, 2, "loop"), (2, 2, "run"), (2, 2, "loop"))
    ]
    assert all(0 < it.efficiency <= 1 and it.replica_mb > 10 and 0 <= it.stolen < 1 for it in results)
    printed = capsys.readouterr().out
    assert printed.startswith("Simulated device: ")
    assert "efficiency, simulated device" in printed
    written = json.loads(file.read_text())
    assert written["device"] == "simulated"
    assert len(written["results"]) == 6


def test_efficiency_is_that_of_the_median_and_beside_its_bar() -> None:
    measured = Measured(Scene(4, 8, "run"), (0.21, 0.205, 0.3), 0.2, 12.0, 210.0, 0.084)
    assert measured.efficiency == pytest.approx(0.2 / 0.21)
    assert str(measured) == "| 4 | 8 | run | 210.0 | 95.2% (BELOW 97%) | 7.6 of 8 | 12 | 210 | 8% |"
    assert "93.0% (>= 92%)" in str(Measured(Scene(1, 64, "loop"), (0.215,), 0.2, 100.0, 210.0))


def test_nodes_make_workers() -> None:
    with contextlib.closing(scaling.strategy_of(Scene(4, 8, "run"))) as strategy:
        assert isinstance(strategy, rd.MultiWorkerMirroredStrategy)
    with contextlib.closing(scaling.strategy_of(Scene(1, 8, "run"))) as strategy:
        assert isinstance(strategy, rd.MirroredStrategy)
