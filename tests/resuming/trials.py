"""Kills a program, lets it run again, and compares what came of it with what comes of one that nobody disturbs."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from raydist.core.failpoints import FAILPOINT_VARIABLE
from tests.resuming.journal import JOURNAL_VARIABLE, Account, Journal, account_of, differences
from tests.resuming.lives import Life, Lives, TrialProgram
from tests.resuming.power_loss import FLUSHES_VARIABLE, lose_power

__all__ = ["Death", "TrialReport", "Trials", "random_deaths"]

_KILLED = -9
_LOG_BYTES = 3000
_LOOK_S = 0.01  # between two looks whether a life has begun


@final
@dataclass(frozen=True)
class Death:
    """The end of a life: by itself, or by the trial.

    Attributes:
        failpoint: Where the process kills itself when it comes there for the `count`-th time.
        count: See there.
        seconds: Without a failpoint: it is killed so long after its start, unless it has ended.
        once_begun: The seconds count from `Journal.begins`: for programs that start for long.
    """

    failpoint: str = ""
    count: int = 1
    seconds: float = 0.0
    once_begun: bool = False

    @property
    def environment(self) -> Mapping[str, str]:
        return {FAILPOINT_VARIABLE: f"{self.failpoint}:{self.count}"} if self.failpoint else {}

    def end(self, life: Life, journal: Journal, limit_s: float) -> int | None:
        """End it; its exit code. None: it neither ended nor was killed within the limit."""
        if self.failpoint:
            return life.exit_code(limit_s)
        latest = time.monotonic() + limit_s
        while self.once_begun and not journal.has_begun(life.pid) and time.monotonic() < latest:
            if (code := life.exit_code(_LOOK_S)) is not None:
                return code
        if (code := life.exit_code(self.seconds)) is None:
            life.kill()
            code = life.exit_code(limit_s)
        return code


def random_deaths(rng: random.Random, whole_s: float, most: int = 3, *, once_begun: bool = False) -> Iterator[Death]:
    """One to `most` deaths within the time that an undisturbed life takes, or its work."""
    for _ in range(rng.randint(1, most)):
        yield Death(seconds=rng.uniform(0.0, whole_s), once_begun=once_begun)


@final
@dataclass
class TrialReport:
    """How many programs ran to their end, how many lives were ended on the way, and what was not as if undisturbed."""

    trials: int = 0
    kills: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, other: TrialReport) -> None:
        """Count another one's as well."""
        self.trials += other.trials
        self.kills += other.kills
        self.problems += other.problems


@final
class Trials:
    """Runs one program again and again, each time in a folder of its own.

    Args:
        lives: How its processes are started.
        program: The program.
        folder: An empty folder for all that is written.
        environment: For all processes.
        power_fails: Whether each death is that of the machine: what was not flushed is lost (see `power_loss.py`).
    """

    def __init__(
        self, lives: Lives, program: TrialProgram, folder: Path, environment: Mapping[str, str], *, power_fails: bool
    ) -> None:
        self._lives = lives
        self._program = program
        self._folder = folder
        self._environment = environment
        self._power_fails = power_fails
        self._number = 0

    def undisturbed(self) -> Account:
        """Return the result of the program if nobody kills it; it must come to its end."""
        report, account = self._run(())
        assert not report.problems, "\n".join(report.problems)
        assert account.digest, "the program must call Journal.ends"
        return account

    def disturbed(self, deaths: Iterable[Death], expected: Account) -> TrialReport:
        """Let the program die so, one life after the other, and then come to its end."""
        report, account = self._run(deaths)
        if not report.problems:
            report.problems += [f"{problem}{self._where()}" for problem in differences(expected, account)]
        return report

    def _run(self, deaths: Iterable[Death]) -> tuple[TrialReport, Account]:
        self._number += 1
        journal = Journal(self._trial)
        journal.folder.mkdir(parents=True)
        report = TrialReport(trials=1)
        for death in deaths:
            if self._die(death, journal, report):
                return report, account_of(journal.lines())
        life = self._begin({})
        code = life.exit_code(self._program.limit_s)
        if code != 0:
            report.problems.append(self._failure(life, code))
        return report, account_of(journal.lines())

    @property
    def kept(self) -> Path:
        """The folder that the last program has left."""
        return Journal(self._trial).folder

    @property
    def _trial(self) -> Path:
        return self._folder / f"trial-{self._number}"

    def _die(self, death: Death, journal: Journal, report: TrialReport) -> bool:
        """Return True if the program has ended, well or badly."""
        life = self._begin(death.environment)
        code = death.end(life, journal, self._program.limit_s)
        if code == _KILLED:
            report.kills += 1
            if self._power_fails:
                lose_power(self.kept, self._notes)
            return False
        if code != 0:
            report.problems.append(self._failure(life, code))
        elif death.failpoint:
            report.problems.append(f"it must come to {death.failpoint} {death.count} times, but did not")
        return True

    def _begin(self, environment: Mapping[str, str]) -> Life:
        own = {JOURNAL_VARIABLE: str(self._trial)}
        if self._power_fails:
            own[FLUSHES_VARIABLE] = str(self._notes)
        return self._lives(self._program, {**self._environment, **own, **environment}, self._trial / "log")

    @property
    def _notes(self) -> Path:
        return self._trial / "flushes"

    def _failure(self, life: Life, code: int | None) -> str:
        if code is None:
            life.kill()
            life.exit_code(self._program.limit_s)
        how = f"ended with code {code}" if code is not None else f"lived for more than {self._program.limit_s} s"
        return f"the program must come to its end, but {how}{self._where()}"

    def _where(self) -> str:
        log = self._trial / "log"
        said = log.read_text(errors="replace")[-_LOG_BYTES:] if log.exists() else ""
        return f" (in {self._trial}, where it said: {said.strip() or 'nothing'})"
