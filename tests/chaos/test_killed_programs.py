"""Programs that save and resume are killed: rows, curves and states are as if nothing had happened.

`make test` kills each program 3 times at random moments, loops once at each failpoint, and plants two bugs. `make
chaos` kills more often, plants all bugs, and also kills programs on two replicas.
"""

from __future__ import annotations

import csv
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from raydist.core.failpoints import KNOWN_FAILPOINTS
from tests.chaos.extent import how_many
from tests.chaos.programs.planted_bugs import PLANTED, POWER_BUGS
from tests.resuming.lives import Lives, TrialProgram, forked_lives, fresh_life
from tests.resuming.trials import Death, TrialReport, Trials, random_deaths
from tests.summary.reading import curves

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    """A process that forks the programs: its imports take seconds."""
    with forked_lives(("torchmetrics", "tensorboardX", "tests.chaos.programs.own_loop")) as forked:
        yield forked


@pytest.fixture
def cluster_address(ray_cluster: None) -> dict[str, str]:
    """The environment of a process that joins the session's cluster."""
    import ray

    return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}


SAVING = tuple(name for name in KNOWN_FAILPOINTS if name.startswith("checkpoint"))


def trials(
    lives: Lives,
    script: str,
    folder: Path,
    *arguments: str,
    power_fails: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Trials:
    """Of a script in `programs/`."""
    program = TrialProgram(ROOT / "tests" / "chaos" / "programs" / script, arguments, limit_s=120.0)
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environment or {})}
    return Trials(lives, program, folder / "_".join(arguments), environment, power_fails=power_fails)


def killed_at_random(trial: Trials, kills: int, *, once_begun: bool = False) -> TrialReport:
    """Programs that die up to three times, until there were so many deaths.

    Args:
        trial: Of the program.
        kills: How many.
        once_begun: Whether lives end once they have restored what they found only: those with replicas start for long.
    """
    expected = trial.undisturbed()
    began = time.monotonic()
    worked_s = trial.undisturbed().worked_s  # now that all is warm
    whole_s = time.monotonic() - began
    report, rng = TrialReport(), random.Random(0)
    while report.kills < kills and not report.problems:
        deaths = random_deaths(rng, worked_s if once_begun else whole_s, once_begun=once_begun)
        report.add(trial.disturbed(deaths, expected))
    print(
        f"{report.trials} programs, {report.kills} lives ended at random moments, {whole_s:.2f} s a whole one, "
        f"{worked_s:.2f} s of it work"
    )
    return report


def killed_at_failpoints(trial: Trials, times: int) -> tuple[TrialReport, int]:
    """Programs that die at each failpoint, at the first `times` passages that matter; and how many deaths that is.

    Under `make test` a program dies at three of them, one life after the other.
    """
    expected = trial.undisturbed()
    report, kills, together = TrialReport(), 0, how_many(some=3, many=1)
    for at in range(0, len(KNOWN_FAILPOINTS), together):
        for time_of_it in range(1, 1 + times):
            deaths = [death for name in KNOWN_FAILPOINTS[at : at + together] for death in deaths_at(name, time_of_it)]
            kills += len(deaths)
            report.add(trial.disturbed(deaths, expected))
    print(f"{report.trials} programs, {report.kills} lives ended at {len(KNOWN_FAILPOINTS)} failpoints")
    return report, kills


def deaths_at(name: str, time_of_it: int) -> list[Death]:
    """One at a failpoint; where there must be something to clean up, another one before it."""
    part = name.partition(".")[0]
    if part == "cleanup":
        return [Death("checkpoint.within_manifest", 2 + time_of_it), Death(name)]
    return [Death(name, 1 if part == "lease" else 2 + time_of_it)]


def is_caught(right: Trials, wrong: Trials) -> bool:
    """Whether a program with a bug is told from one without, which dies at some failpoint of its saves."""
    expected = right.undisturbed()
    return any(wrong.disturbed([Death(name, 7)], expected).problems for name in SAVING)


LOOP = "own_loop.py"

LOOP_KILLS = how_many(some=3, many=200)

KILLS_ON_REPLICAS = how_many(some=0, many=20)

TIMES = how_many(some=1, many=5)  # that a failpoint is passed


@pytest.mark.timeout(60 + 4 * LOOP_KILLS)
@pytest.mark.long
def test_loops_are_killed_at_random_moments(lives: Lives, tmp_path: Path) -> None:
    report = killed_at_random(trials(lives, LOOP, tmp_path, "one_device"), LOOP_KILLS)
    assert report.problems == []
    assert report.kills >= LOOP_KILLS


@pytest.mark.timeout(120 * TIMES)
def test_loops_are_killed_at_every_failpoint_as_the_power_fails(lives: Lives, tmp_path: Path) -> None:
    report, kills = killed_at_failpoints(trials(lives, LOOP, tmp_path, "one_device", power_fails=True), TIMES)
    assert report.problems == []
    assert report.kills == kills


@pytest.mark.timeout(120)
@pytest.mark.parametrize("bug", [*PLANTED][: how_many(some=2, many=len(PLANTED))])
def test_planted_bugs_are_caught(lives: Lives, tmp_path: Path, bug: str) -> None:
    right = trials(lives, LOOP, tmp_path / "right", "one_device")
    wrong = trials(lives, LOOP, tmp_path / "wrong", "one_device", bug, power_fails=bug in POWER_BUGS)
    assert is_caught(right, wrong)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.timeout(3600)
@pytest.mark.skipif(KILLS_ON_REPLICAS == 0, reason="make chaos runs it: each life starts replicas")
@pytest.mark.parametrize("program", [LOOP, "fit.py", "estimator.py"])
def test_programs_on_two_replicas_are_killed_at_random_moments(
    program: str, tmp_path: Path, cluster_address: dict[str, str]
) -> None:
    trial = trials(fresh_life, program, tmp_path, "mirrored", environment=cluster_address)
    assert killed_at_random(trial, KILLS_ON_REPLICAS, once_begun=True).problems == []


ESTIMATOR_KILLS = how_many(some=2, many=10)


@pytest.mark.timeout(60 + 10 * ESTIMATOR_KILLS)
def test_estimators_are_killed_at_random_moments(lives: Lives, tmp_path: Path) -> None:
    report = killed_at_random(trials(lives, "estimator.py", tmp_path, "one_device"), ESTIMATOR_KILLS)
    assert report.problems == []
    assert report.kills >= ESTIMATOR_KILLS


FIT = "fit.py"

FIT_KILLS = how_many(some=3, many=50)

EPOCHS, BATCHES = 3, 8


def check_curves(trial: Trials) -> None:
    """Steps of curves, and lines of the table, of the last program."""
    logs = trial.kept / "logs"
    steps = {name: [step for step, _ in curves(logs / "train").scalars(name)] for name in ("batch_loss", "epoch_loss")}
    # Files of one second may be read in another order than that in which they were written.
    assert sorted(set(steps["batch_loss"])) == sorted(steps["batch_loss"])
    assert len(steps["batch_loss"]) == EPOCHS * BATCHES
    assert len(steps["epoch_loss"]) == EPOCHS
    with (trial.kept / "log.csv").open() as table:
        assert [line["epoch"] for line in csv.DictReader(table)] == [str(epoch) for epoch in range(EPOCHS)]


@pytest.mark.timeout(60 + 6 * FIT_KILLS)
def test_fits_are_killed_at_random_moments(lives: Lives, tmp_path: Path) -> None:
    trial = trials(lives, FIT, tmp_path, "one_device")
    report = killed_at_random(trial, FIT_KILLS)
    assert report.problems == []
    assert report.kills >= FIT_KILLS


@pytest.mark.timeout(120)
def test_curves_have_no_gap(lives: Lives, tmp_path: Path) -> None:
    trial = trials(lives, FIT, tmp_path, "one_device")
    expected = trial.undisturbed()
    assert [set(rows) for rows in expected.rows.values()] == [{epoch} for epoch in range(1, EPOCHS + 1)]
    check_curves(trial)
    for save in (3, 4, 5, 10)[: how_many(some=2, many=4)]:  # saves 4, 8, 12: the end of an epoch
        report = trial.disturbed([Death("checkpoint.before_rename", save)], expected)
        assert report.problems == []
        check_curves(trial)
