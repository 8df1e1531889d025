"""`fit` is killed and run again: history and weights bit for bit, each row once an epoch, curves without a gap.

`make test` kills 10 times at random moments, `make chaos` 50 times, and 20 on two replicas.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.chaos.extent import how_many
from tests.chaos.killing import killed_at_random, trials
from tests.resuming.lives import ForkedLives, FreshLives
from tests.resuming.trials import AtFailpoint, Trials
from tests.summary.reading import curves

PROGRAM = "fit.py"
KILLS = how_many(some=10, many=50)
KILLS_ON_REPLICAS = how_many(some=0, many=20)
EPOCHS, BATCHES = 3, 8


def check_curves(trial: Trials) -> None:
    """Steps of curves, and lines of the table, of the last program."""
    logs = trial.kept / "logs"
    steps = {name: [step for step, _ in curves(logs / "train").scalars(name)] for name in ("batch_loss", "epoch_loss")}
    assert sorted(set(steps["batch_loss"])) == steps["batch_loss"]
    assert len(steps["batch_loss"]) == EPOCHS * BATCHES
    assert len(steps["epoch_loss"]) == EPOCHS
    with (trial.kept / "log.csv").open() as table:
        assert [line["epoch"] for line in csv.DictReader(table)] == [str(epoch) for epoch in range(EPOCHS)]


@pytest.mark.timeout(60 + 6 * KILLS)
def test_killed_at_random_moments(lives: ForkedLives, tmp_path: Path) -> None:
    trial = trials(lives, PROGRAM, tmp_path, "one_device")
    report = killed_at_random(trial, KILLS)
    assert report.problems == []
    assert report.kills >= KILLS


@pytest.mark.parametrize("save", [3, 4, 5, 10])  # saves 4, 8, 12: the end of an epoch
def test_curves_have_no_gap(lives: ForkedLives, tmp_path: Path, save: int) -> None:
    trial = trials(lives, PROGRAM, tmp_path, "one_device")
    expected = trial.undisturbed()
    assert [set(rows) for rows in expected.rows.values()] == [{epoch} for epoch in range(1, EPOCHS + 1)]
    check_curves(trial)
    report = trial.disturbed([AtFailpoint("checkpoint.before_rename", save)], expected)
    assert report.problems == []
    check_curves(trial)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.timeout(3600)
@pytest.mark.skipif(KILLS_ON_REPLICAS == 0, reason="make chaos runs it: each life starts replicas")
def test_two_replicas_are_killed_at_random_moments(tmp_path: Path, cluster_address: dict[str, str]) -> None:
    with FreshLives() as fresh:
        trial = trials(fresh, PROGRAM, tmp_path, "mirrored", environment=cluster_address)
        report = killed_at_random(trial, KILLS_ON_REPLICAS, once_begun=True)
    assert report.problems == []
