"""The processes in which contenders run."""

from __future__ import annotations

import io
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.pipelines.__main__ import chosen, parse_args, run
from benchmarks.pipelines.contestant import Contestant, Job, PassError
from benchmarks.pipelines.runner import Settings
from benchmarks.pipelines.scene import Pass, Scene
from benchmarks.pipelines.worker import Worker, passes_of
from benchmarks.pipelines.workload import Workload

JOB = Job("any", "/nowhere", rows=3, num_workers=0, num_calls=None, warm_up=True)

ECHO = """
    import json, sys
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps({"version": "1"} if request else {"result": 3, "seconds": 0.5}), flush=True)
"""


@pytest.fixture
def contestants() -> Iterator[list[Contestant]]:
    made: list[Contestant] = []
    yield made
    for contestant in made:
        contestant.close()


def contestant_of(program: str, log: Path, made: list[Contestant], limit_s: float = 30.0) -> Contestant:
    made.append(Contestant([sys.executable, "-c", textwrap.dedent(program)], log / "log", limit_s))
    return made[-1]


def test_a_contestant_answers(tmp_path: Path, contestants: list[Contestant]) -> None:
    contestant = contestant_of(ECHO, tmp_path, contestants)
    assert contestant.prepare(JOB) == "1"
    assert contestant.run() == (3.0, 0.5)


def test_a_contestant_that_ends_is_told_with_its_log(tmp_path: Path, contestants: list[Contestant]) -> None:
    contestant = contestant_of("raise SystemExit(1)", tmp_path, contestants)
    with pytest.raises(PassError, match=r"log\)"):
        contestant.prepare(JOB)
    with pytest.raises(PassError, match="ended"):
        contestant.run()


def test_a_contestant_that_hangs_is_ended(tmp_path: Path, contestants: list[Contestant]) -> None:
    contestant = contestant_of("import time; time.sleep(600)", tmp_path, contestants, limit_s=0.2)
    start = time.monotonic()
    with pytest.raises(PassError, match="longer than"):
        contestant.prepare(JOB)
    assert time.monotonic() - start < 60


def counting(log: list[str]) -> Worker:
    def count(scene: Scene) -> Pass:
        scene.resources.callback(log.append, "closed")
        return lambda: float(scene.rows)

    return Worker(lambda: {"count": count}, lambda: "2.0")


def request(workload: str = "count", **others: Any) -> dict[str, Any]:
    settings = {"folder": "/nowhere", "rows": 7, "num_workers": 0, "num_calls": None, "warm_up": True}
    return {"workload": workload, **settings, **others}


def test_a_worker_prepares_passes_and_closes() -> None:
    log: list[str] = []
    worker = counting(log)
    assert worker.answer(request()) == {"version": "2.0"}
    assert worker.answer({})["result"] == 7.0
    assert worker.answer(request(rows=8)) == {"version": "2.0"}
    assert log == ["closed"]
    worker.close()
    assert log == ["closed", "closed"]


@pytest.mark.parametrize(
    ("asked", "problem"), [({}, "was prepared"), (request("unknown"), "KeyError: 'unknown'"), (request(rows="x"), "x")]
)
def test_what_a_worker_cannot_do_is_an_answer(asked: dict[str, Any], problem: str) -> None:
    assert problem in counting([]).answer(asked)["problem"]


def test_one_workload_from_the_command_line_to_the_file(tmp_path: Path) -> None:
    workload = Workload("batch_map", "numbers", 10_000, 10_000, ("raydist", "tf.data"))
    console = Console(file=io.StringIO(), width=120)
    settings = Settings(tmp_path, repeat=2, limit_s=120.0, smoke=True)
    run([workload], settings, tmp_path / "results.json", console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "batch_map: numbers" in text
    assert "not available: left out" in text
    assert (tmp_path / "results.json").is_file()


def test_only_what_is_named_is_run() -> None:
    args = parse_args(["--only", "window", "shuffle", "--repeat", "3"])
    assert [workload.name for workload in chosen(args.only)] == ["shuffle", "window"]
    assert args.repeat == 3
    with pytest.raises(SystemExit):
        parse_args(["--only", "nothing"])


def test_passes_are_found_by_the_module() -> None:
    assert "shuffle" in passes_of("raydist_itself")
