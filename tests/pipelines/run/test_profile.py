"""`profile()`: the page, the drawing, the trace and the report."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from functools import partial
from operator import call
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from raydist import Dataset
from raydist.pipelines.metering.meter import Reading
from raydist.pipelines.metering.stats import PipelineStats, summarise
from raydist.pipelines.run.profile import draw, render_page
from tests.refused import check_refused


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
    def epochs(dataset: Dataset) -> list[list[int]]:
        return [[int(x) for x in dataset] for _ in range(2)]

    def bad(x: int) -> int:
        return 6 // (int(x) - 3)

    plain, profiled = (Dataset.range(20).map(bad).shuffle(20, seed=3).ignore_errors() for _ in range(2))
    profile = profiled.profile(0.1, tmp_path / "p.html")
    assert profile.epochs > 1
    assert "before the time was over" in str(profile)
    assert [stage.name for stage in profile.stats.stages] == [
        *("range-0", "map-1", "shuffle-2", "ignore_errors-3", "ignore_errors-3-prefetch")
    ]
    assert profile.stats.stages[1].errors > 0
    assert profile.stats.elements > 20
    assert epochs(profiled) == epochs(plain), "later epochs are what they would have been"
    iterator = plain.as_numpy_iterator()
    next(iterator)
    assert iterator.meters.meter("range-0", owner=("RangeOp",)).events is None, "nothing is recorded otherwise"


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


def test_arguments_are_checked_before_anything_runs(tmp_path: Path) -> None:
    dataset = Dataset.range(1)
    wrong: list[Any] = [0, -1.0, float("inf"), float("nan"), "5"]
    cases: list[tuple[Callable[[], object], str]] = [
        *((partial(dataset.profile, seconds), "finite number of seconds > 0, got") for seconds in wrong),
        (lambda: dataset.profile(1.0, tmp_path), "must name an .html file, got"),
        (lambda: dataset.profile(1.0, tmp_path / "no" / "p.html"), "directory that exists, got"),
    ]
    check_refused(call, cases)
    assert dataset.stats().stages == ()


READINGS = (
    Reading(
        "range-0", "range(9)", kind="source", elements=2_000_000, bytes=8 * 10**6, bytes_here=8 * 10**6, busy_s=0.5
    ),
    Reading(
        "map-1", "map(a.py:3 <lambda>)", ("range-0",), errors=7, busy_s=3.0, cpu_s=1.5, wait_s=0.5, input_wait_s=0.5
    ),
    Reading("prefetch-2", "prefetch(4)", ("map-1",), kind="prefetch", wait_s=3.0, buffer_limit=4, mean_buffered=3.0),
)
STATS = summarise(READINGS, elapsed_s=4.0, decisions=["map-1: 1 -> 2 threads <because> it was busy"])


def parsed(page: str) -> ElementTree.Element:
    return ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))


def seen(page: ElementTree.Element) -> list[str]:
    """The texts that a reader sees."""
    return [text for text in page[1].itertext() if text.strip()]


def test_the_page() -> None:
    source = render_page(STATS, title="Profile of <Dataset>", notes=["Two <epochs>."])
    page = parsed(source)
    decision = "map-1: 1 -> 2 threads <because> it was busy"
    texts = ["Profile of <Dataset>", "Two <epochs>.", STATS.headline, decision, "map(a.py:3 <lambda>)"]
    assert {*texts, "▲ Bottleneck: ", "▲ map-1"} <= set(seen(page)), "text is escaped"
    head, *rows = [["".join(cell.itertext()) for cell in row] for row in page.iter("tr")]
    assert head == ["stage", "where", "elements/s", "MB/s", "busy", "CPU", "queue", "errors", "waits for"]
    assert rows[0] == ["range-0range(9)", "inline", "500 k", "2.0", "12 %", "", "", "", "map-1 (88 %)"]
    assert rows[1][4:8] == ["75 %", "50 %", "", "7"]
    assert rows[2][6] == "75 %"
    assert [row.get("class") for row in page.iter("tr")] == [None, None, "marked", None], "the bottleneck"
    names = {name for node in page.iter() for name, _ in node.items()}
    assert not names & {"src", "href", "srcset", "data", "onclick", "onload"}, "the page needs nothing else"
    assert not re.search(r"http|@import|url\((?!#)", source)
    nothing = seen(parsed(render_page(PipelineStats(), title="x")))
    assert "Nothing was changed while it ran." in nothing
    assert not any("Bottleneck" in text for text in nothing)


SOURCE = Reading("range-0", "range(9)", kind="source", elements=9, busy_s=1.0)
OTHER = Reading("range-1", "range(9)", kind="source", elements=9, busy_s=1.0)
MAP = Reading("map-2", "map(<lambda>)", ("range-1",), elements=9, busy_s=6.0, parallelism=2, place="threads")
ZIP = Reading("zip-3", "zip", ("range-0", "map-2"), elements=9)
AHEAD = Reading("prefetch-4", "prefetch(4)", ("zip-3",), kind="prefetch", elements=9, buffer_limit=4, mean_buffered=1.0)
BRANCHES = summarise([SOURCE, OTHER, MAP, ZIP, AHEAD], elapsed_s=10.0, consumer_busy_s=2.0)


def test_the_graph_has_the_consumer_above_its_inputs_and_marks_the_bottleneck() -> None:
    root = ElementTree.fromstring(draw(BRANCHES))
    names = [(node.text, node.get("class")) for node in root.iter("strong")]
    plain = [(name, None) for name in ("consumer", "prefetch-4", "zip-3", "range-0")]
    assert names == [*plain, ("▲ map-2", "marked"), ("range-1", None)]
    text = "".join(root.itertext())
    assert "map(<lambda>) · 0.9/s · 2 threads · 30 % busy" in text
    assert "25 % full" in text
    assert "handing elements over takes longest" in draw(summarise([SOURCE], elapsed_s=9.0, convert_s=8.0))
    both = [Reading(f"map-{n}", "map", ("range-0",)) for n in (1, 2)]
    drawn = draw(summarise([SOURCE, *both, Reading("zip-3", "zip", ("map-1", "map-2"))], elapsed_s=1.0))
    assert drawn.count("range-0<") == 2, "the second branch names it"
