"""Asynchronous training beside other libraries: what is run and how it is told. Figures come from the benchmark."""

from __future__ import annotations

import fcntl
import importlib
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks.asynchronous import __main__ as command
from benchmarks.asynchronous import studies
from benchmarks.asynchronous.bars import ACCURACY, BARS, MEMORY_RATIO
from benchmarks.asynchronous.models import make_network, make_step
from benchmarks.asynchronous.peers import ray_server, raydist_stragglers, tf_servers
from benchmarks.asynchronous.simulated import SLOWER, Counter, each_is_slow_at_times, one_is_slow
from benchmarks.asynchronous.simulated import make_step as make_simulated_step
from benchmarks.asynchronous.sizes import SIZES, TWO_SERVERS, random_rows, size_of
from benchmarks.asynchronous.workloads import PLAIN_RAY, SCHEDULE, STUDIES, TENSORFLOW, WORKLOADS
from benchmarks.pipelines.contestant import PassError
from benchmarks.pipelines.results import Outcome
from benchmarks.pipelines.runner import Settings
from benchmarks.processes import Process
from benchmarks.steps import report
from benchmarks.steps.cpu import DRIVER, KINDS, REPLICAS, SERVERS, kind_of
from benchmarks.steps.figures import Figures, Measured, Table
from benchmarks.steps.workloads import ONE_REPLICA, PEERS, Line, Workload

BY_NAME = {workload.name: workload for workload in WORKLOADS}
ALL_LINES = [line for workload in WORKLOADS for line in workload.lines]


def measured(line: Line, *values: float) -> Measured:
    made = Measured(line, Outcome(line.label))
    for value in values:
        made.add({"ms": value, "count": 7, "cpu": dict.fromkeys(KINDS, 1.0)})
    return made


@pytest.fixture(autouse=True)
def subnormal_numbers() -> Iterator[None]:
    """What benchmarks set for a process of their own is not left to other tests of this one."""
    yield
    torch.set_flush_denormal(False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Noise in the place of images, a few."""
    draw = np.random.default_rng(0)
    (tmp_path / "mnist").mkdir()
    np.save(tmp_path / "mnist" / "images.npy", draw.integers(0, 256, (200, 28, 28), dtype=np.uint8))
    np.save(tmp_path / "mnist" / "labels.npy", draw.integers(0, 10, 200))
    return tmp_path


def test_every_line_has_its_own_name_and_references_exist() -> None:
    assert len(BY_NAME) == len(WORKLOADS)
    for workload in WORKLOADS:
        assert len({line.name for line in workload.lines}) == len(workload.lines)
        assert set(workload.references) <= {line.label for line in workload.lines}


@pytest.mark.parametrize("module", sorted({line.module for line in ALL_LINES if line.contender not in PEERS}))
def test_contenders_can_be_imported(module: str) -> None:
    assert callable(importlib.import_module(module).make_runs)


def test_tensorflow_runs_in_the_environment_of_the_peers() -> None:
    assert {line.label for line in ALL_LINES if line.is_peer} == {TENSORFLOW}


def test_every_bar_can_be_measured() -> None:
    tables = tuple(Table(workload, tuple(measured(line, 1.0) for line in workload.lines)) for workload in WORKLOADS)
    figures = Figures(tables, {ACCURACY: 0.96, MEMORY_RATIO: 2.0})
    assert [bar.what for bar in BARS if bar.value(figures) is None] == []
    assert [bar.what for bar in BARS if bar.value(Figures(())) is not None] == []
    assert {bar.name for bar in BARS} == {f"D{number}" for number in range(1, 7)}


def test_bars_are_ratios_of_speeds() -> None:
    workload = BY_NAME["mlp16"]
    times = {SCHEDULE: 1.0, TENSORFLOW: 3.0, PLAIN_RAY: 2.0}
    lines = tuple(measured(line, times.get(line.label, 9.0)) for line in workload.lines)
    bars = report.bars_of(Figures((Table(workload, lines),)), BARS)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in bars.splitlines()[2:]]
    assert [row[1:] for row in cells] == [[">= 2 x", "3 x", "met"], [">= 3 x", "2 x", "not met"]]


def test_tables_tell_updates_and_the_servers_part() -> None:
    workload = BY_NAME["mlp16"]
    title, _, line = report.table_of(Table(workload, (measured(workload.lines[0], 4.0),))).splitlines()
    assert "updates/s" in title
    assert "CPU servers" in title
    assert line.split("|")[3].strip() == "250"


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ("rank_tf_chief /tmp/socket {}", DRIVER),
        ("rank_tf_server worker 0 {}", REPLICAS),
        ("rank_tf_server ps 0 {}", SERVERS),
    ],
)
def test_processes_of_tensorflow_are_told_by_their_command(arguments: str, kind: str) -> None:
    process = Process(11, 10, 1, f"python -m benchmarks.asynchronous.peers.{arguments}", 0.0)
    assert kind_of(process, 10) == kind


def test_networks_have_the_sizes_they_are_called_by() -> None:
    sizes = {name: sum(p.numel() for p in make_network(name).parameters()) for name in ("mlp16", "mlp1024")}
    assert sizes == {"mlp16": 13_002, "mlp1024": 1_863_690}
    assert [size_of(name + TWO_SERVERS) for name in SIZES] == list(SIZES.values())


def test_rows_are_drawn_from_the_whole_table() -> None:
    ids, targets = random_rows(2)
    assert len(ids) == 2 * SIZES["embedding"].rows
    assert 990_000 < ids.max() < 1_000_000
    assert set(targets.tolist()) == {0.0, 1.0}


def test_rows_by_a_power_law_come_again_and_lie_anywhere() -> None:
    ids = studies.power_law_ids(20_000)
    assert 0 <= ids.min() < 10**8 < 9 * 10**8 < ids.max() < studies.HUGE_ROWS
    rows, counts = np.unique(ids, return_counts=True)
    assert 0.4 < len(rows) / len(ids) < 0.9
    assert counts.max() > 200


def test_the_plain_server_applies_what_a_worker_computed(folder: Path) -> None:
    server, worker = ray_server.ParameterServer("mlp16"), ray_server.DataWorker("mlp16", str(folder))
    before = {name: value.clone() for name, value in server.get_weights().items()}
    for _ in range(4):  # three batches of 64 rows are in 200
        after = server.apply_gradients(worker.compute_gradients(server.get_weights()))
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_a_cluster_has_an_address_for_each() -> None:
    cluster = tf_servers.cluster_of(2, 1)
    assert [len(cluster[job]) for job in ("worker", "ps")] == [2, 1]
    assert len({*cluster["worker"], *cluster["ps"]}) == 3


def test_the_slow_worker_is_the_first_to_ask(tmp_path: Path) -> None:
    mine = one_is_slow(str(tmp_path / "mine"))
    assert [mine(), mine()] == [SLOWER, SLOWER]
    with (tmp_path / "other").open("w") as held:  # as another process would
        fcntl.flock(held, fcntl.LOCK_EX)
        assert one_is_slow(str(tmp_path / "other"))() == 1.0


def test_a_tenth_of_the_steps_is_slow() -> None:
    slow = sum(each_is_slow_at_times() == SLOWER for _ in range(5000))
    assert 350 < slow < 650


def test_a_step_of_simulated_compute_is_counted() -> None:
    counter = Counter()
    step = make_simulated_step(counter, lambda: 1.0, step_s=0.0)
    for _ in range(3):
        step(torch.ones(8, dtype=torch.float64))
    assert counter.updates() == 3


def test_what_was_not_applied_does_not_count() -> None:
    counter = Counter()
    step = make_simulated_step(counter, lambda: 1.0, step_s=0.01)

    def train(count: int) -> None:  # two batches an update, and a third of the batches lost
        for _ in range(count // 3):
            step(torch.ones(8, dtype=torch.float64))

    start = time.perf_counter()
    seconds = raydist_stragglers.per_batch(counter, train, of_step=2)(12)
    assert seconds == pytest.approx((time.perf_counter() - start) * 12 / 8, rel=0.3)


def test_a_step_trains(folder: Path) -> None:
    torch.manual_seed(0)
    network = make_network("mlp16")
    step = make_step(network, torch.optim.SGD(network.parameters(), 0.5))
    batch = next(ray_server.batches_of("mlp16", folder))
    first = float(step(batch))
    assert float([step(batch) for _ in range(20)][-1]) < first


def test_a_study_that_fails_is_an_answer() -> None:
    assert "KeyError" in studies.StudyWorker().answer({"study": "nothing", "smoke": True})["problem"]
    assert tuple(studies.STUDIES) == STUDIES


class FoundAtOnce:
    """In the place of a study's process."""

    def __init__(self, *settings: Any) -> None:
        pass

    def request(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["study"] == "huge_table":
            raise PassError("no memory")
        return {"findings": {ACCURACY: 0.5}}

    def close(self) -> None:
        pass


def test_workloads_and_studies_from_the_command_line_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of one replica in a process of its own; who needs the peers' environment is left out."""
    lines = (Line(ONE_REPLICA, "raydist_one", "run"), *(line for line in BY_NAME["mlp16"].lines if line.is_peer))
    monkeypatch.setattr(command, "WORKLOADS", (Workload("mlp16", "a small network", lines, (), unit="updates"),))
    monkeypatch.setattr(command, "Contestant", FoundAtOnce)
    console = Console(file=io.StringIO(), width=40)
    settings = Settings(tmp_path, repeat=2, limit_s=50.0, smoke=True)
    command.Measuring(settings, tmp_path / "results.json", console).run(["mlp16", *STUDIES])
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "not available: left out" in text
    assert "huge_table: not available: no memory" in text
    assert "not met" in text
    written = json.loads((tmp_path / "results.json").read_text())
    assert len(written["tables"][0]["lines"][ONE_REPLICA]["values"]) == 2
    assert written["findings"] == {ACCURACY: 0.5}
    assert {bar["verdict"] for bar in written["bars"]} == {"not measured", "not met"}


def test_only_what_is_named_is_run() -> None:
    args = command.parse_args(["--only", "mlp16", "mnist", "--repeat", "3"])
    assert args.only == ["mlp16", "mnist"]
    with pytest.raises(SystemExit):
        command.parse_args(["--only", "nothing"])
