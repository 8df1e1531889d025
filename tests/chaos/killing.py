"""What is done to programs that save and resume, whatever they are."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path

from raydist.core.failpoints import KNOWN_FAILPOINTS
from tests.resuming.lives import Lives, TrialProgram
from tests.resuming.trials import AfterBegin, AtFailpoint, TrialReport, Trials, random_deaths

__all__ = ["ROOT", "SAVING", "is_caught", "killed_at_failpoints", "killed_at_random", "trials"]

ROOT = Path(__file__).parents[2]
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
    return Trials(lives, program, folder / "_".join(arguments), environment=environment, power_fails=power_fails)


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
        deaths = random_deaths(rng, worked_s, kind=AfterBegin) if once_begun else random_deaths(rng, whole_s)
        report.add(trial.disturbed(deaths, expected))
    print(
        f"{report.trials} programs, {report.kills} lives ended at random moments, {whole_s:.2f} s a whole one, "
        f"{worked_s:.2f} s of it work"
    )
    return report


def killed_at_failpoints(trial: Trials, times: int) -> tuple[TrialReport, int]:
    """Programs that die at each failpoint, at the first `times` passages that matter; and how many deaths that is."""
    expected = trial.undisturbed()
    report, kills = TrialReport(), 0
    for name in KNOWN_FAILPOINTS:
        for time_of_it in range(1, 1 + times):
            deaths = deaths_at(name, time_of_it)
            kills += len(deaths)
            report.add(trial.disturbed(deaths, expected))
    print(f"{report.trials} programs, {report.kills} lives ended at {len(KNOWN_FAILPOINTS)} failpoints")
    return report, kills


def deaths_at(name: str, time_of_it: int) -> list[AtFailpoint]:
    """One at a failpoint; where there must be something to clean up, another one before it."""
    part = name.partition(".")[0]
    if part == "cleanup":
        return [AtFailpoint("checkpoint.within_manifest", 2 + time_of_it), AtFailpoint(name)]
    return [AtFailpoint(name, 1 if part == "lease" else 2 + time_of_it)]


def is_caught(right: Trials, wrong: Trials) -> bool:
    """Whether a program with a bug is told from one without, which dies at some failpoint of its saves."""
    expected = right.undisturbed()
    return any(wrong.disturbed([AtFailpoint(name, 7)], expected).problems for name in SAVING)
