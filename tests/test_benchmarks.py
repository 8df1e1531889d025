"""Every workload of pipelines runs once with little data; contenders can be imported, and bars be measured."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

import raydist as rd
from benchmarks import scaling
from benchmarks.asynchronous.bars import ACCURACY, MEMORY_RATIO
from benchmarks.asynchronous.bars import BARS as ASYNCHRONOUS_BARS
from benchmarks.asynchronous.workloads import WORKLOADS as ASYNCHRONOUS_WORKLOADS
from benchmarks.pipelines import __main__ as pipelines
from benchmarks.pipelines import generate
from benchmarks.pipelines.contenders import CONTENDERS
from benchmarks.pipelines.contestant import Contestant, PassError
from benchmarks.pipelines.peers import raydist_itself
from benchmarks.pipelines.results import Outcome
from benchmarks.pipelines.runner import Settings
from benchmarks.pipelines.scene import Scene
from benchmarks.pipelines.workload import Workload
from benchmarks.pipelines.workloads import WORKLOADS
from benchmarks.steps import __main__ as steps
from benchmarks.steps import cpu
from benchmarks.steps.bars import BARS
from benchmarks.steps.figures import Figures, Measured, Table
from benchmarks.steps.workloads import ONE_REPLICA, PEERS, Line
from benchmarks.steps.workloads import WORKLOADS as STEP_WORKLOADS
from benchmarks.steps.workloads import Workload as StepWorkload

ON_RAY = ("mnist_input_workers", "jpeg_input_workers", "object_store_queue", "prefetched_next", "input_worker_scaling")
ROWS_SEEN = {"filter": 1_000, "window": 296}  # others see all rows; how many a random filter keeps is not known here


@pytest.fixture(autouse=True)
def subnormal_numbers() -> Iterator[None]:
    """Benchmarks set this for a process of their own."""
    yield
    torch.set_flush_denormal(False)


@pytest.mark.timeout(120)
def test_workloads_in_this_process_and_one_from_the_command_line_to_the_file(tmp_path: Path) -> None:
    for workload in WORKLOADS:
        if workload.name in ON_RAY:
            continue
        for name in workload.data:
            generate.ensure(name, tmp_path, smoke=True)
        scene = Scene(tmp_path, workload.smoke_rows)
        with scene.resources:
            result = raydist_itself.PASSES[workload.name](scene)()
        if workload.name == "parquet":
            assert 0 < result < workload.smoke_rows
        elif workload.is_timed:
            assert result == ROWS_SEEN.get(workload.name, workload.smoke_rows), workload.name
        else:
            assert result > 0, workload.name
    file = io.StringIO()
    settings = Settings(tmp_path, repeat=2, limit_s=120.0, smoke=True)
    told = Workload("batch_map", "numbers", 10_000, 10_000, ("raydist", "tf.data"))
    pipelines.run([told], settings, tmp_path / "results.json", Console(file=file, width=120))
    assert "batch_map: numbers" in file.getvalue()
    assert "not available: left out" in file.getvalue()
    (written,) = json.loads((tmp_path / "results.json").read_text())["comparisons"]
    assert len(written["contenders"]["raydist"]["values"]) == 2


def test_every_contender_of_a_workload_is_known_and_can_be_imported() -> None:
    assert {label for workload in WORKLOADS for label in workload.contenders} == set(CONTENDERS)
    assert set(raydist_itself.PASSES) == {workload.name for workload in WORKLOADS}
    trained = (*STEP_WORKLOADS, *ASYNCHRONOUS_WORKLOADS)
    modules = {line.module for workload in trained for line in workload.lines if line.contender not in PEERS}
    for module in sorted(modules):
        assert callable(importlib.import_module(module).make_runs)
    for workload in trained:
        assert len({line.name for line in workload.lines}) == len(workload.lines)
        assert set(workload.references) <= {line.label for line in workload.lines}


def test_every_bar_can_be_measured() -> None:
    found = {ACCURACY: 0.96, MEMORY_RATIO: 2.0}
    for workloads, bars, findings in (
        (STEP_WORKLOADS, BARS, dict[str, float]()),
        (ASYNCHRONOUS_WORKLOADS, ASYNCHRONOUS_BARS, found),
    ):
        tables = []
        for workload in workloads:
            made = [Measured(line, Outcome(line.label)) for line in workload.lines]
            for one in made:
                one.add({"ms": 1.0, "count": 7, "cpu": dict.fromkeys(cpu.KINDS, 1.0)})
            tables.append(Table(workload, tuple(made)))
        assert [bar.what for bar in bars if bar.value(Figures(tuple(tables), findings)) is None] == []
        assert [bar.what for bar in bars if bar.value(Figures(())) is not None] == []


@pytest.mark.long
def test_a_step_from_the_command_line_to_the_file(tmp_path: Path) -> None:
    """One replica in a process of its own; what needs the peers' environment is left out."""
    lines = (Line(ONE_REPLICA, "raydist_one", "run"), Line("TensorFlow", "tf_mirrored", "step"))
    file = io.StringIO()
    settings = Settings(tmp_path, repeat=2, limit_s=50.0, smoke=True)
    workload = StepWorkload("mlp16", "a small network", lines, (ONE_REPLICA,))
    steps.run([workload], settings, tmp_path / "results.json", Console(file=file, width=40))
    assert "1.00x" in file.getvalue()
    assert "not available: left out" in file.getvalue()
    (table,) = json.loads((tmp_path / "results.json").read_text())["tables"]
    assert len(table["lines"][ONE_REPLICA]["values"]) == 2
    assert table["lines"][ONE_REPLICA]["median"] > 0


@pytest.mark.long
def test_scaling_measures_every_scene_and_says_that_it_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One replica in this process stands for all."""
    clusters = []

    @contextlib.contextmanager
    def cluster_of(nodes: int, replicas: int) -> Iterator[None]:
        clusters.append((nodes, replicas))
        yield

    monkeypatch.setattr(scaling, "cluster_of", cluster_of)
    monkeypatch.setattr(scaling, "strategy_of", lambda scene: rd.OneDeviceStrategy("cpu"))
    file = tmp_path / "scaling.json"
    results = scaling.main(["--smoke", "--nodes", "1", "2", "--replicas", "1", "2", "--json", str(file)])
    assert clusters == [(1, 1), (1, 2), (2, 2)]  # as many replicas on each node
    assert all(0 < it.efficiency <= 1 and it.replica_mb > 10 and 0 <= it.stolen < 1 for it in results)
    assert "efficiency, simulated device" in capsys.readouterr().out
    assert len(json.loads(file.read_text())["results"]) == 6


def test_a_contestant_that_ends_or_hangs_is_an_error(tmp_path: Path) -> None:
    for program, limit_s, message in (
        ("raise SystemExit(1)", 30.0, r"log\)"),
        ("import time; time.sleep(600)", 0.2, "longer than"),
    ):
        contestant = Contestant([sys.executable, "-c", program], tmp_path / "log", limit_s)
        with contextlib.closing(contestant), pytest.raises(PassError, match=message):
            contestant.request({})
