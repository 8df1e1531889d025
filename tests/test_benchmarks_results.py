"""Medians, ratios, tables and files of the benchmarks."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.pipelines import report
from benchmarks.pipelines.results import Comparison, Outcome
from benchmarks.pipelines.workload import Workload

FAST = Workload("fast", "a fast one", 100, 10, ("raydist", "peer"))
SMALL = Workload("small", "a small one", 100, 10, ("raydist", "peer"), unit="MB", smaller_is_better=True)


def timed(label: str, *seconds: float, rows: int = 100) -> Outcome:
    outcome = Outcome(label)
    for duration in seconds:
        outcome.add(rows, duration, is_timed=True)
    return outcome


def valued(label: str, *values: float) -> Outcome:
    outcome = Outcome(label)
    for value in values:
        outcome.add(value, 1.0, is_timed=False)
    return outcome


def test_the_median_of_an_even_number_of_passes_lies_between_the_middle_ones() -> None:
    assert timed("raydist", 1.0, 2.0, 4.0, 10.0).median == (100 / 2 + 100 / 4) / 2


def test_the_spread_is_a_part_of_the_median() -> None:
    assert valued("raydist", 8.0, 10.0, 12.0).spread == pytest.approx(0.4)
    assert valued("raydist").spread is None


@pytest.mark.parametrize(("workload", "expected"), [(FAST, 4.0), (SMALL, 0.25)])
def test_a_ratio_above_one_is_good_whatever_is_better(workload: Workload, expected: float) -> None:
    mine, other = valued("raydist", 40.0), valued("peer", 10.0)
    assert Comparison(workload, (mine, other)).ratio_to(other) == expected


@pytest.mark.parametrize("missing", [0, 1])
def test_without_a_value_there_is_no_ratio(missing: int) -> None:
    outcomes = [timed("raydist", 1.0), timed("peer", 1.0)]
    outcomes[missing] = Outcome("missing", problem="left out")
    assert Comparison(FAST, tuple(outcomes)).ratio_to(outcomes[1]) is None


def test_other_rows_are_other_work() -> None:
    comparison = Comparison(FAST, (timed("raydist", 1.0), timed("half", 1.0, rows=50), Outcome("absent")))
    assert comparison.disagreements() == ["half saw 50 rows, raydist saw 100"]


def test_the_table_names_ratios_and_what_is_missing() -> None:
    outcomes = (timed("raydist", 1.0), timed("peer", 4.0), Outcome("absent", problem="no such reader"))
    console = Console(file=io.StringIO(), width=120)
    console.print(report.table_of(Comparison(FAST, outcomes)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "4.00x" in text
    assert "not available: no such reader" in text
    assert "1.00x" not in text


@pytest.mark.parametrize(
    ("value", "text"), [(1234567.8, "1,234,568"), (100.0, "100"), (12.345, "12.3"), (0.00012345, "0.000123")]
)
def test_numbers_have_as_many_digits_as_say_something(value: float, text: str) -> None:
    assert report.number(value) == text


def test_the_file_holds_every_pass(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    comparison = Comparison(FAST, (timed("raydist", 1.0, 2.0), Outcome("absent", problem="left out")))
    report.write_json(path, report.machine(smoke=True, repeat=2, images="Noise"), [comparison])
    content = json.loads(path.read_text())
    assert content["machine"]["repeat"] == 2
    assert content["comparisons"][0]["contenders"]["raydist"]["values"] == [100.0, 50.0]
    assert content["comparisons"][0]["contenders"]["absent"]["problem"] == "left out"
    assert [path.name for path in path.parent.iterdir()] == ["results.json"]
