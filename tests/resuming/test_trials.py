"""The harness passes a program that saves rightly, and catches every planted bug."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.resuming.journal import Journal, account_of
from tests.resuming.lives import ForkedLives, TrialProgram
from tests.resuming.trials import (
    AfterBegin,
    AfterSeconds,
    AtFailpoint,
    Death,
    TrialReport,
    Trials,
    random_deaths,
)

SCRIPT = Path(__file__).parent / "by_hand.py"
FAILPOINTS = ("checkpoint.within_file", "checkpoint.before_rename", "checkpoint.after_rename")


@pytest.fixture(scope="module")
def lives() -> Iterator[ForkedLives]:
    with ForkedLives() as forked:
        yield forked


@pytest.fixture
def trials(lives: ForkedLives, tmp_path: Path) -> Callable[..., Trials]:
    def of(bug: str = "", *, power_fails: bool = False) -> Trials:
        program = TrialProgram(SCRIPT, (bug,), limit_s=10.0)
        return Trials(lives, program, tmp_path / (bug or "right"), power_fails=power_fails)

    return of


def reports(trials: Trials, *, count: int = 3) -> TrialReport:
    expected = trials.undisturbed()
    report = TrialReport()
    for name in FAILPOINTS:
        report.add(trials.disturbed([AtFailpoint(name, count)], expected))
    return report


@pytest.mark.parametrize("power_fails", [False, True])
def test_what_saves_rightly_passes(trials: Callable[..., Trials], power_fails: bool) -> None:
    report = reports(trials(power_fails=power_fails))
    assert report == TrialReport(trials=3, kills=3, problems=[])


def test_dies_several_times_at_random_moments(trials: Callable[..., Trials]) -> None:
    of = trials()
    expected = of.undisturbed()
    assert len(expected.rows) == 12
    rng = random.Random(0)
    report = TrialReport()
    while report.kills < 10 and report.trials < 40:
        report.add(of.disturbed(random_deaths(rng, whole_s=0.1), expected))
    assert report.problems == []
    assert report.kills >= 10


@pytest.mark.parametrize(
    ("bug", "power_fails", "said"),
    [
        ("name_first", False, "must come to its end, but ended with code 1"),
        ("early", False, "life 1 began at step 2, but 3 was safe"),
        ("one_batch_off", False, "step 4 must have the rows"),
        ("no_resume", False, "life 1 began at step 0, but 2 was safe"),
        ("raise", False, "KeyError: 'planted'"),
        ("no_flush", True, "must come to its end, but ended with code 1"),
        ("no_directory_flush", True, "life 1 began at step 0, but 2 was safe"),
    ],
)
def test_planted_bugs_are_caught(trials: Callable[..., Trials], bug: str, power_fails: bool, said: str) -> None:
    of = trials(bug, power_fails=power_fails)
    expected = trials().undisturbed()
    problems = [problem for name in FAILPOINTS for problem in of.disturbed([AtFailpoint(name, 3)], expected).problems]
    assert any(said in problem for problem in problems), problems


@pytest.mark.parametrize("bug", ["no_flush", "no_directory_flush"])
def test_a_killed_process_loses_nothing_that_was_not_flushed(trials: Callable[..., Trials], bug: str) -> None:
    assert reports(trials(bug)).problems == []


def test_a_program_that_does_not_end_is_a_problem(lives: ForkedLives, tmp_path: Path) -> None:
    program = TrialProgram(SCRIPT, ("hang",), limit_s=0.5)
    of = Trials(lives, program, tmp_path)
    expected = of.undisturbed()
    report = of.disturbed([AtFailpoint(FAILPOINTS[0], 3)], expected)
    assert "lived for more than 0.5 s" in report.problems[0]


def test_a_failpoint_that_is_not_reached_is_a_problem(trials: Callable[..., Trials]) -> None:
    of = trials()
    expected = of.undisturbed()
    for name, count in ((FAILPOINTS[0], 99), ("lease.before", 1)):
        report = of.disturbed([AtFailpoint(name, count)], expected)
        assert report.kills == 0
        assert f"must come to the failpoint {name} {count} times" in report.problems[0]


def test_a_life_may_end_before_it_is_killed(trials: Callable[..., Trials]) -> None:
    of = trials()
    expected = of.undisturbed()
    late: Death = AfterSeconds(10.0)
    assert of.disturbed([late, late], expected) == TrialReport(trials=1)


def test_random_deaths_are_within_the_time() -> None:
    deaths = list(random_deaths(random.Random(1), 2.0, most=4))
    assert 1 <= len(deaths) <= 4
    assert all(isinstance(death, AfterSeconds) and 0 <= death.seconds <= 2 for death in deaths)
    (death,) = random_deaths(random.Random(1), 2.0, most=1, kind=AfterBegin)
    assert isinstance(death, AfterBegin)


def test_a_life_may_be_ended_once_it_has_begun(trials: Callable[..., Trials]) -> None:
    of = trials("slow")
    expected = of.undisturbed()
    assert 0.3 < expected.worked_s < 10
    for death, begun in ((AfterSeconds(0.1), [0]), (AfterBegin(0.0), [0, 0])):
        assert of.disturbed([death], expected) == TrialReport(trials=1, kills=1)
        assert account_of(Journal(of.kept.parent).lines()).begun == begun
    assert of.disturbed([AfterBegin(10.0)], expected) == TrialReport(trials=1)
