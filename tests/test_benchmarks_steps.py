"""Steps beside those of other libraries: processes, figures, tables and bars."""

from __future__ import annotations

import importlib
import io
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.pipelines.results import Outcome
from benchmarks.pipelines.runner import Settings
from benchmarks.processes import Process, read_processes, started_by
from benchmarks.steps import cpu, report
from benchmarks.steps.__main__ import chosen, parse_args, run
from benchmarks.steps.bars import BARS, Bar
from benchmarks.steps.cpu import by_kind, kind_of
from benchmarks.steps.figures import Figures, Measured, Table
from benchmarks.steps.models import MODELS
from benchmarks.steps.ranks import Ranks, serve_rank
from benchmarks.steps.scene import Run, Scene, repetitions
from benchmarks.steps.worker import StepWorker
from benchmarks.steps.workloads import BARE, DDP, ONE_REPLICA, PEERS, STOCK, STRATEGY, WORKLOADS, Line, Workload

BY_NAME = {workload.name: workload for workload in WORKLOADS}
ALL_LINES = [line for workload in WORKLOADS for line in workload.lines]


def process(pid: int, parent: int, command: str = "", session: int = 1, cpu_ms: float = 10.0) -> Process:
    return Process(pid, parent, session, command, cpu_ms)


def measured(label: str, *values: float, variant: str = "", cpu_ms: Mapping[str, float] | None = None) -> Measured:
    made = Measured(Line(label, "module", "run", variant), Outcome(label))
    for value in values:
        made.add({"ms": value, "count": 7, "cpu": {**dict.fromkeys(cpu.KINDS, 0.0), **(cpu_ms or {})}})
    return made


def figures_of(workload: str, *lines: Measured) -> Figures:
    return Figures((Table(BY_NAME[workload], lines),))


class Clock:
    """A run whose repetitions take a time of their own; the first call takes long."""

    def __init__(self, seconds: float) -> None:
        self.now, self.counts, self.seconds = 0.0, list[int](), seconds

    def run(self, count: int) -> float:
        self.now += self.seconds * count if self.counts else 100.0
        self.counts.append(count)
        return 0.0  # may be another time than the clock's

    def read(self) -> float:
        return self.now


@pytest.mark.parametrize(("seconds", "expected"), [(0.01, 200), (0.0001, 20_000), (50.0, 2)])
def test_repetitions_fill_a_pass_by_the_clock(seconds: float, expected: int) -> None:
    clock = Clock(seconds)
    assert repetitions(clock.run, 2.0, clock.read) == expected
    assert max(clock.counts[1:]) <= max(4, expected)


def test_a_pass_of_one_repetition_is_not_tried_before() -> None:
    clock = Clock(1.0)
    assert repetitions(clock.run, 0.0, clock.read) == 1
    assert clock.counts == []


def test_a_contender_is_its_session_and_its_descendants() -> None:
    inside = [process(10, 1, session=10), process(11, 10, session=10), process(12, 11, session=12)]
    orphans = [process(13, 1, session=12), process(14, 1, session=10)]  # their parents have ended
    others = [process(1, 0, session=1), process(20, 1, session=20), process(21, 20, session=20)]
    assert started_by(10, [*others, *orphans, *reversed(inside)]) == [*orphans, *reversed(inside)]


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("ray::InputPipeline.next_pieces", cpu.INPUT),
        ("ray::ReplicaHost", cpu.REPLICAS),
        ("/x/ray/core/src/ray/raylet/raylet --raylet_socket_name=1", cpu.RAYLET),
        ("/x/ray/core/src/ray/gcs/gcs_server --log_dir=1", cpu.GCS),
        ("python -m benchmarks.steps.peers.rank_ddp /tmp/socket", cpu.REPLICAS),
        ("python -m torch.distributed.run -m benchmarks.steps.peers.rank_ddp /tmp/socket", cpu.OTHER),
        ("python dashboard/agent.py", cpu.OTHER),
    ],
)
def test_processes_are_told_by_their_command(command: str, kind: str) -> None:
    assert kind_of(process(11, 10, command), 10) == kind
    assert kind_of(process(10, 1, command), 10) == cpu.DRIVER


def test_cpu_time_is_read_from_proc() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            root = busy.pid
            while by_kind(root, read_processes())[cpu.DRIVER] < 50:
                pass
        finally:
            busy.kill()


def test_cpu_time_is_of_one_repetition() -> None:
    before, after = dict.fromkeys(cpu.KINDS, 100.0), dict.fromkeys(cpu.KINDS, 160.0)
    assert cpu.between(before, after, 30) == dict.fromkeys(cpu.KINDS, 2.0)


def test_every_line_has_its_own_name_and_references_exist() -> None:
    for workload in WORKLOADS:
        assert len({line.name for line in workload.lines}) == len(workload.lines)
        assert set(workload.references) <= {line.label for line in workload.lines}


@pytest.mark.parametrize("contender", sorted({line.contender for line in ALL_LINES} - set(PEERS)))
def test_contenders_can_be_imported(contender: str) -> None:
    assert callable(importlib.import_module(f"benchmarks.steps.peers.{contender}").make_runs)


def test_the_networks_have_the_sizes_they_are_called_by() -> None:
    sizes = {name: sum(p.numel() for p in model.make().parameters()) for name, model in MODELS.items()}
    assert sizes == {"mlp16": 13_002, "mlp1024": 1_863_690, "cnn": 421_642}


def test_ratios_are_of_times_and_of_the_same_variant() -> None:
    fast, slow = measured("raydist", 2.0, 4.0, 3.0, variant="1 MB"), measured(STOCK, 12.0, variant="1 MB")
    other = measured(STOCK, 1.0, variant="4 KB")
    table = Table(BY_NAME["allreduce_2"], (fast, other, slow))
    assert table.ratio(fast, STOCK) == 0.25
    assert table.ratio(fast, "absent") is None
    assert fast.count == 7


@pytest.mark.parametrize(
    ("bar", "value", "verdict"),
    [
        (Bar("P", "x", lambda figures: None, 2.0), 2.0, "met"),
        (Bar("P", "x", lambda figures: None, 2.0), 2.1, "not met"),
        (Bar("P", "x", lambda figures: None, 2.0, at_least=True), 2.1, "met"),
        (Bar("P", "x", lambda figures: None, 2.0, at_least=True), 1.9, "not met"),
        (Bar("P", "x", lambda figures: None, 2.0), None, "not measured"),
    ],
)
def test_a_bar_is_met_or_not(bar: Bar, value: float | None, verdict: str) -> None:
    assert bar.verdict(value) == verdict


def values_of_bars(figures: Figures) -> dict[str, float]:
    return {bar.what: value for bar in BARS if (value := bar.value(figures)) is not None}


def test_bars_of_steps_compare_with_ddp() -> None:
    lines = (measured("raydist, loop", 3.0), measured(DDP, 4.0), measured(ONE_REPLICA, 6.0))
    assert values_of_bars(figures_of("cnn", *lines)) == {
        f"cnn, loop: time against {DDP}": 0.75,
        f"cnn, loop: time against {ONE_REPLICA}": 0.5,
    }


def test_bars_of_cpu_leave_out_the_replicas() -> None:
    cpu_ms = {cpu.REPLICAS: 100.0, cpu.DRIVER: 1.0, cpu.INPUT: 2.0, cpu.RAYLET: 3.0, cpu.GCS: 4.0, cpu.OTHER: 5.0}
    (value,) = values_of_bars(figures_of("mlp16", measured("raydist, loop", 1.0, cpu_ms=cpu_ms))).values()
    assert value == 15.0


def test_bars_of_all_reduce_compare_speeds() -> None:
    lines = (measured("raydist, communicator", 1.0, variant="1 MB"), measured(STOCK, 6.0, variant="1 MB"))
    (value,) = values_of_bars(figures_of("allreduce_4", *lines)).values()
    assert value == 6.0


def test_bars_of_one_device_and_of_the_start_have_units() -> None:
    added = figures_of(
        "one_device", measured("OneDeviceStrategy", 0.05, variant="5 ms"), measured("bare loop", 0.02, variant="5 ms")
    )
    assert list(values_of_bars(added).values()) == [pytest.approx(30.0)]
    paired = measured(STRATEGY, 0.05, 0.95, 0.5, variant="5 ms"), measured(BARE, 0.02, 0.90, 0.1, variant="5 ms")
    assert list(values_of_bars(figures_of("one_device", *paired)).values()) == [pytest.approx(50.0)]
    start = figures_of("start", measured("raydist, Ray is up", 4000.0), measured("Ray Train, Ray is up", 16000.0))
    assert list(values_of_bars(start).values()) == [4.0, 0.25]


def test_every_bar_can_be_measured() -> None:
    tables = tuple(
        Table(workload, tuple(measured(line.label, 1.0, variant=line.variant) for line in workload.lines))
        for workload in WORKLOADS
    )
    assert [bar.what for bar in BARS if bar.value(Figures(tables)) is None] == []
    assert values_of_bars(Figures(())) == {}


def test_tables_are_markdown() -> None:
    absent = Measured(Line(DDP, "ddp", "step"), Outcome(DDP, problem="left out"))
    text = report.table_of(Table(BY_NAME["cnn"], (measured("raydist, loop", 10.0, 12.0, 11.0), absent)))
    title, rule, first, second = text.splitlines()
    assert title.startswith("| cnn")
    assert set(rule) == {"|", "-", ":"}
    assert first.split("|")[1].strip() == "raydist, loop"
    assert "18 %" in first
    assert "not available: left out" in second
    assert len({line.count("|") for line in (title, rule, first, second)}) == 1


def test_the_table_of_bars_has_what_was_measured() -> None:
    text = report.bars_of(figures_of("cnn", measured("raydist, loop", 3.0), measured(DDP, 4.0)))
    (line,) = text.splitlines()[2:]
    assert [cell.strip() for cell in line.split("|")[1:-1]] == [
        f"P4 cnn, loop: time against {DDP}",
        "<= 1 x",
        "0.75 x",
        "met",
    ]


def test_ranks_do_what_they_are_told(tmp_path: Path) -> None:
    def make(workload: str, folder: str) -> Mapping[str, Run]:
        def broken(count: int) -> float:
            raise ValueError("no such thing")

        return {"run": lambda count: float(count), "broken": broken}

    with ExitStack() as stack:
        ranks = Ranks(Scene("cnn", tmp_path, resources=stack), 2)
        threads = [threading.Thread(target=serve_rank, args=(ranks.address, make)) for _ in range(2)]
        for thread in threads:
            thread.start()
        ranks.accept()
        ranks.prepare("cnn", tmp_path)
        assert ranks.run("run")(5) == 5.0
        with pytest.raises(RuntimeError, match="no such thing"):
            ranks.run("broken")(1)
        assert ranks.run("run")(6) == 6.0
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []

    def make_runs(scene: Scene) -> Mapping[str, Run]:
        scene.resources.callback(log.append, "closed")

        def run(count: int) -> float:
            log.append(str(count))
            return 0.25 * count

        return {"run": run}

    monkeypatch.setattr(StepWorker, "_make_runs", lambda self: make_runs)
    return log


def request(**others: Any) -> dict[str, Any]:
    return {"workload": "cnn", "folder": "/nowhere", "ranks": 2, "target_s": 0.0, **others}


def test_the_first_pass_only_finds_out_how_long_one_is(counted: list[str]) -> None:
    worker = StepWorker("any")
    assert worker.answer(request()) == {"runs": ["run"]}
    assert worker.answer({"run": "run"}) == {}
    assert counted == []
    answer = worker.answer({"run": "run"})
    assert (answer["ms"], answer["count"]) == (250.0, 1)
    assert set(answer["cpu"]) == set(cpu.KINDS)
    worker.close()
    assert counted[-1] == "closed"


@pytest.mark.parametrize(
    ("asked", "problem"), [({"run": "run"}, "was prepared"), (request(unknown=1), "unknown"), (request(folder=1), "")]
)
def test_what_a_worker_cannot_do_is_an_answer(asked: dict[str, Any], problem: str) -> None:
    assert problem in StepWorker("no_such_module").answer(asked)["problem"]


def test_one_workload_from_the_command_line_to_the_file(tmp_path: Path) -> None:
    """A step of one replica in a process of its own; who needs the peers' environment is left out."""
    lines = (Line(ONE_REPLICA, "raydist_one", "run"), Line("TensorFlow", "tf_mirrored", "step"))
    workload = Workload("mlp16", "a small network", lines, (ONE_REPLICA,))
    console = Console(file=io.StringIO(), width=40)
    run([workload], Settings(tmp_path, repeat=2, limit_s=50.0, smoke=True), tmp_path / "results.json", console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1.00x" in text
    assert "not available: left out" in text
    (table,) = json.loads((tmp_path / "results.json").read_text())["tables"]
    assert len(table["lines"][ONE_REPLICA]["values"]) == 2
    assert table["lines"][ONE_REPLICA]["median"] > 0


def test_only_what_is_named_is_run() -> None:
    args = parse_args(["--only", "cnn", "mlp16", "--repeat", "3"])
    assert [workload.name for workload in chosen(args.only)] == ["mlp16", "cnn"]
    assert args.repeat == 3
    with pytest.raises(SystemExit):
        parse_args(["--only", "nothing"])
