from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from raydist import Dataset, Options
from raydist.core.errors import InvalidArgumentError
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.run.iterator import DatasetIterator
from raydist.pipelines.run.profile import run_profile
from raydist.pipelines.sources.range import RangeOp


def rows_of(trace: Path) -> dict[str, set[str]]:
    """Stages of a trace by the name of the thread or worker that ran them."""
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    rows: dict[str, set[str]] = {name: set() for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            rows[names[event["tid"]]].add(event["name"])
    return rows


def test_page_trace_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = Dataset.range(1000).map(lambda x: x + 1, num_parallel_calls=2).batch(10).prefetch(2)
    profile = dataset.profile(0.2, tmp_path / "input.html")
    assert capsys.readouterr().out == f"{profile}\n"
    assert str(profile).splitlines()[0] == "Profile of <Dataset prefetch(2), cardinality 100>"
    assert str(profile).splitlines()[-2:] == [f"Page: {profile.html_path}", f"Trace: {profile.trace_path}"]
    assert (profile.html_path, profile.trace_path) == (tmp_path / "input.html", tmp_path / "input.trace.json")
    assert "map-1" in profile.html_path.read_text()
    assert dataset.stats().elements >= profile.stats.elements > 0
    rows = rows_of(profile.trace_path)
    assert rows["raydist-prefetch-3"] >= {"range-0", "map-1", "batch-2"}
    assert {stage for worker, stages in rows.items() if worker.startswith("raydist-map") for stage in stages} == {
        "map-1"
    }


def test_short_epochs_follow_each_other(tmp_path: Path) -> None:
    dataset = Dataset.range(10)
    profile = dataset.profile(0.1, tmp_path / "p.html")
    assert profile.epochs > 1
    assert "before the time was over" in str(profile)
    assert [stage.name for stage in profile.stats.stages] == ["range-0"]
    assert profile.stats.elements > 10


def test_later_epochs_are_what_they_would_have_been(tmp_path: Path) -> None:
    def epochs(dataset: Dataset) -> list[list[int]]:
        return [[int(x) for x in dataset] for _ in range(2)]

    plain, profiled = (Dataset.range(20).shuffle(20).with_options(Options(seed=3)) for _ in range(2))
    profiled.profile(0.05, tmp_path / "p.html")
    assert epochs(profiled) == epochs(plain)


def test_the_start_is_told_and_left_out(tmp_path: Path) -> None:
    calls: list[int] = []

    def slow_at_first(x: int) -> int:
        if not calls:
            time.sleep(0.6)
        calls.append(x)
        return x

    profile = Dataset.range(10).repeat().map(slow_at_first, num_parallel_calls=1).profile(0.05, tmp_path / "p.html")
    assert profile.started_s >= 0.6
    assert profile.stats.elapsed_s < 0.6
    assert f"The first element took {profile.started_s:.1f} s, which are left out here." in str(profile)


def test_an_empty_dataset_ends_at_once(tmp_path: Path) -> None:
    profile = Dataset.range(0).profile(60.0, tmp_path / "p.html")
    assert (profile.epochs, profile.stats.elements) == (1, 0)
    assert "No element was handed out." in str(profile)


def test_errors_of_elements_are_counted(tmp_path: Path) -> None:
    def fail(x: int) -> int:
        raise ValueError(x)

    profile = Dataset.range(3).map(fail).profile(0.05, tmp_path / "p.html")
    assert next(stage for stage in profile.stats.stages if stage.name == "map-1").errors > 0


def test_what_cannot_be_opened_is_raised(tmp_path: Path) -> None:
    def refuse(block: Block) -> list[Any]:
        raise OSError("no")

    def open_epoch(epoch: int, meters: IterationMeters) -> DatasetIterator[Any]:
        op = RangeOp(0, 5)
        return DatasetIterator(op, options=Options(), seed=0, epoch=epoch, convert=refuse, meters=meters)

    with pytest.raises(OSError, match="no"):
        run_profile(open_epoch, title="x", seconds=60.0, path=tmp_path / "p.html")


def test_a_new_directory_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    profile = Dataset.range(10).profile(0.01)
    assert profile.html_path.name == "profile.html"
    assert profile.trace_path.parent == profile.html_path.parent
    assert profile.html_path.parent.parent == tmp_path


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), float("nan"), "5"])
def test_seconds_must_be_a_time(seconds: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="finite number of seconds > 0, got"):
        Dataset.range(1).profile(seconds)


def test_the_path_is_checked_before_anything_runs(tmp_path: Path) -> None:
    dataset = Dataset.range(1)
    with pytest.raises(InvalidArgumentError, match="must name an .html file, got"):
        dataset.profile(1.0, tmp_path)
    with pytest.raises(InvalidArgumentError, match="directory that exists, got"):
        dataset.profile(1.0, tmp_path / "no" / "p.html")
    assert dataset.stats().stages == ()


@pytest.mark.ray
def test_input_workers_have_rows_of_their_own(ray_cluster: object, tmp_path: Path) -> None:
    dataset = Dataset.range(200).map(lambda x: x + 1).batch(10).with_options(Options(num_input_workers=1))
    profile = dataset.profile(0.2, tmp_path / "p.html")
    mapped = next(stage for stage in profile.stats.stages if stage.name == "map-1")
    assert (mapped.place, mapped.parallelism) == ("actors", 1)
    assert mapped.busy > 0.0
    workers = [stages for name, stages in rows_of(profile.trace_path).items() if "worker" in name]
    assert workers
    assert all(stages == {"map-1"} for stages in workers)


def test_nothing_is_recorded_otherwise() -> None:
    iterator = Dataset.range(10).as_numpy_iterator()
    list(iterator)
    assert iterator.meters.meter("range-0", owner=("RangeOp",)).ring is None
