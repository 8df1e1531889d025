"""Loops that save and resume are killed: nothing that was safe is lost, rows and all state are as if nothing had been.

`make test` kills 10 times at random moments and once at each failpoint, `make chaos` 200 times, and 20 on two replicas.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.extent import how_many
from tests.chaos.killing import is_caught, killed_at_failpoints, killed_at_random, trials
from tests.chaos.programs.planted_bugs import PLANTED, POWER_BUGS
from tests.resuming.lives import ForkedLives, FreshLives

PROGRAM = "own_loop.py"
KILLS = how_many(some=10, many=200)
KILLS_ON_REPLICAS = how_many(some=0, many=20)
TIMES = how_many(some=1, many=5)  # that a failpoint is passed


@pytest.mark.timeout(60 + 4 * KILLS)
def test_killed_at_random_moments(lives: ForkedLives, tmp_path: Path) -> None:
    report = killed_at_random(trials(lives, PROGRAM, tmp_path, "one_device"), KILLS)
    assert report.problems == []
    assert report.kills >= KILLS


@pytest.mark.timeout(120 * TIMES)
def test_killed_at_every_failpoint_as_the_power_fails(lives: ForkedLives, tmp_path: Path) -> None:
    report, kills = killed_at_failpoints(trials(lives, PROGRAM, tmp_path, "one_device", power_fails=True), TIMES)
    assert report.problems == []
    assert report.kills == kills


@pytest.mark.timeout(120)
@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_caught(lives: ForkedLives, tmp_path: Path, bug: str) -> None:
    right = trials(lives, PROGRAM, tmp_path / "right", "one_device")
    wrong = trials(lives, PROGRAM, tmp_path / "wrong", "one_device", bug, power_fails=bug in POWER_BUGS)
    assert is_caught(right, wrong)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.timeout(3600)
@pytest.mark.skipif(KILLS_ON_REPLICAS == 0, reason="make chaos runs it: each life starts replicas")
def test_two_replicas_are_killed_at_random_moments(tmp_path: Path, cluster_address: dict[str, str]) -> None:
    with FreshLives() as fresh:
        trial = trials(fresh, PROGRAM, tmp_path, "mirrored", environment=cluster_address)
        report = killed_at_random(trial, KILLS_ON_REPLICAS, once_begun=True)
    assert report.problems == []
