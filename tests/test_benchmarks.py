"""Every kind of benchmark runs once with little data; ratios, bars and the accounting of processes are right."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import raydist as rd
from benchmarks import autotune, batch_map, scaling
from benchmarks.asynchronous import __main__ as asynchronous
from benchmarks.asynchronous.bars import ACCURACY, MEMORY_RATIO
from benchmarks.asynchronous.bars import BARS as ASYNCHRONOUS_BARS
from benchmarks.asynchronous.workloads import STUDIES
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
from benchmarks.steps.bars import BARS, Bar
from benchmarks.steps.figures import Figures, Measured, Table
from benchmarks.steps.workloads import ONE_REPLICA, PEERS, Line
from benchmarks.steps.workloads import WORKLOADS as STEP_WORKLOADS
from benchmarks.steps.workloads import Workload as StepWorkload

ON_RAY = ("mnist_input_workers", "jpeg_input_workers", "object_store_queue", "prefetched_next", "input_worker_scaling")
IN_PROCESS = [workload for workload in WORKLOADS if workload.name not in ON_RAY]
ROWS_SEEN = {"filter": 1_000, "window": 296}  # others see all rows; how many a random filter keeps is not known here


def console_of(width: int = 120) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=width), file


@pytest.fixture(autouse=True)
def subnormal_numbers() -> Iterator[None]:
    """Benchmarks set this for a process of their own."""
    yield
    torch.set_flush_denormal(False)


# --- input pipelines --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.mark.parametrize("workload", IN_PROCESS, ids=lambda workload: workload.name)
def test_workloads_in_this_process(workload: Workload, folder: Path) -> None:
    for name in workload.data:
        generate.ensure(name, folder, smoke=True)
    scene = Scene(folder, workload.smoke_rows)
    with scene.resources:
        result = raydist_itself.PASSES[workload.name](scene)()
    if workload.name == "parquet":
        assert 0 < result < workload.smoke_rows
    elif workload.is_timed:
        assert result == ROWS_SEEN.get(workload.name, workload.smoke_rows)
    else:
        assert result > 0


@pytest.mark.ray
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("ray_cluster")
def test_workloads_on_ray(folder: Path) -> None:
    assert raydist_itself.PASSES["input_worker_scaling"](Scene(folder, rows=4, num_workers=1))() == 4
    scene = Scene(folder, rows=2)
    with scene.resources:
        assert raydist_itself.PASSES["object_store_queue"](scene)() > 0


def test_every_contender_of_a_workload_is_known() -> None:
    assert {label for workload in WORKLOADS for label in workload.contenders} == set(CONTENDERS)
    assert set(raydist_itself.PASSES) == {workload.name for workload in WORKLOADS}


def test_a_pipeline_from_the_command_line_to_the_file(tmp_path: Path) -> None:
    workload = Workload("batch_map", "numbers", 10_000, 10_000, ("raydist", "tf.data"))
    console, file = console_of()
    settings = Settings(tmp_path, repeat=2, limit_s=120.0, smoke=True)
    pipelines.run([workload], settings, tmp_path / "results.json", console)
    assert "batch_map: numbers" in file.getvalue()
    assert "not available: left out" in file.getvalue()
    (written,) = json.loads((tmp_path / "results.json").read_text())["comparisons"]
    assert len(written["contenders"]["raydist"]["values"]) == 2


def test_pipelines_give_the_same_with_autotune_and_without(tmp_path: Path) -> None:
    autotune.write_files(tmp_path, rows=1000)
    for make in autotune.PIPELINES:
        plain = make(autotune.Scene(tmp_path, None, 0.001))
        tuned = make(autotune.Scene(tmp_path, rd.AUTOTUNE, 0.001)).prefetch(rd.AUTOTUNE)
        assert 0 < sum(1 for _ in plain) == sum(1 for _ in tuned)
        assert f"| {make.__name__} |" in str(autotune.compare(make, tmp_path, rows=0.001, repeat=1))


def test_all_sizes_of_batches_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = batch_map.main(["--smoke"])
    assert [costs.batch_bytes for costs in found] == list(batch_map.SIZES)
    assert "| 1024 KB |" in capsys.readouterr().out
    assert str(batch_map.Costs(256 << 10, (5.0,), (31.0,), (30.0,))) == "| 256 KB | 5 | 31 (ABOVE 30) | 30 |"


# --- steps and asynchronous training ----------------------------------------------------------------------------------


def test_every_contender_can_be_imported() -> None:
    lines = [(workload, line) for workload in (*STEP_WORKLOADS, *ASYNCHRONOUS_WORKLOADS) for line in workload.lines]
    for module in sorted({line.module for _, line in lines if line.contender not in PEERS}):
        assert callable(importlib.import_module(module).make_runs)
    for workload in (*STEP_WORKLOADS, *ASYNCHRONOUS_WORKLOADS):
        assert len({line.name for line in workload.lines}) == len(workload.lines)
        assert set(workload.references) <= {line.label for line in workload.lines}


@pytest.mark.parametrize(
    ("workloads", "bars", "findings"),
    [
        (STEP_WORKLOADS, BARS, {}),
        (ASYNCHRONOUS_WORKLOADS, ASYNCHRONOUS_BARS, {ACCURACY: 0.96, MEMORY_RATIO: 2.0}),
    ],
    ids=["steps", "asynchronous"],
)
def test_every_bar_can_be_measured(
    workloads: tuple[StepWorkload, ...], bars: tuple[Bar, ...], findings: dict[str, float]
) -> None:
    tables = []
    for workload in workloads:
        made = [Measured(line, Outcome(line.label)) for line in workload.lines]
        for one in made:
            one.add({"ms": 1.0, "count": 7, "cpu": dict.fromkeys(cpu.KINDS, 1.0)})
        tables.append(Table(workload, tuple(made)))
    assert [bar.what for bar in bars if bar.value(Figures(tuple(tables), findings)) is None] == []
    assert [bar.what for bar in bars if bar.value(Figures(())) is not None] == []


def test_a_step_from_the_command_line_to_the_file(tmp_path: Path) -> None:
    """One replica in a process of its own; what needs the peers' environment is left out."""
    lines = (Line(ONE_REPLICA, "raydist_one", "run"), Line("TensorFlow", "tf_mirrored", "step"))
    console, file = console_of(40)
    settings = Settings(tmp_path, repeat=2, limit_s=50.0, smoke=True)
    workload = StepWorkload("mlp16", "a small network", lines, (ONE_REPLICA,))
    steps.run([workload], settings, tmp_path / "results.json", console)
    assert "1.00x" in file.getvalue()
    assert "not available: left out" in file.getvalue()
    (table,) = json.loads((tmp_path / "results.json").read_text())["tables"]
    assert len(table["lines"][ONE_REPLICA]["values"]) == 2
    assert table["lines"][ONE_REPLICA]["median"] > 0


class FoundAtOnce:
    """Takes the place of a study's process."""

    def __init__(self, *settings: Any) -> None:
        pass

    def request(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["study"] == "huge_table":
            raise PassError("no memory")
        return {"findings": {ACCURACY: 0.5}}

    def close(self) -> None:
        pass


def test_asynchronous_training_from_the_command_line_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlp16 = next(workload for workload in ASYNCHRONOUS_WORKLOADS if workload.name == "mlp16")
    lines = (Line(ONE_REPLICA, "raydist_one", "run"), *(line for line in mlp16.lines if line.is_peer))
    workload = StepWorkload("mlp16", "a small network", lines, (), unit="updates")
    monkeypatch.setattr(asynchronous, "WORKLOADS", (workload,))
    monkeypatch.setattr(asynchronous, "Contestant", FoundAtOnce)
    console, file = console_of(40)
    settings = Settings(tmp_path, repeat=2, limit_s=50.0, smoke=True)
    asynchronous.Measuring(settings, tmp_path / "results.json", console).run(["mlp16", *STUDIES])
    assert "huge_table: not available: no memory" in file.getvalue()
    written = json.loads((tmp_path / "results.json").read_text())
    assert len(written["tables"][0]["lines"][ONE_REPLICA]["values"]) == 2
    assert written["findings"] == {ACCURACY: 0.5}
    assert {bar["verdict"] for bar in written["bars"]} == {"not measured", "not met"}


# --- scaling ----------------------------------------------------------------------------------------------------------


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
    scenes = [(nodes, replicas, driven) for nodes, replicas in clusters for driven in ("run", "loop")]
    assert [(it.scene.nodes, it.scene.replicas, it.scene.driven) for it in results] == scenes
    assert all(0 < it.efficiency <= 1 and it.replica_mb > 10 and 0 <= it.stolen < 1 for it in results)
    assert "efficiency, simulated device" in capsys.readouterr().out
    assert len(json.loads(file.read_text())["results"]) == 6


# --- processes --------------------------------------------------------------------------------------------------------

ECHO = """
    import json, sys
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps({"version": "1"} if request else {"result": 3, "seconds": 0.5}), flush=True)
"""


def contestant_of(program: str, log: Path, limit_s: float = 30.0) -> contextlib.closing[Contestant]:
    return contextlib.closing(Contestant([sys.executable, "-c", textwrap.dedent(program)], log / "log", limit_s))


def test_a_contestant_that_ends_or_hangs_is_an_error(tmp_path: Path) -> None:
    for program, limit_s, message in (
        ("raise SystemExit(1)", 30.0, r"log\)"),
        ("import time; time.sleep(600)", 0.2, "longer than"),
    ):
        with contestant_of(program, tmp_path, limit_s) as contestant, pytest.raises(PassError, match=message):
            contestant.request({})
