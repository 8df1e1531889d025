"""Kills a program, lets it run again, and compares what came of it with what comes of one that nobody disturbs."""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from raydist.core.failpoints import FAILPOINT_VARIABLE
from tests.resuming.journal import JOURNAL_VARIABLE, Account, Journal, account_of, differences
from tests.resuming.lives import Life, Lives, TrialProgram
from tests.resuming.power_loss import FLUSHES_VARIABLE, lose_power

__all__ = ["AfterBegin", "AfterSeconds", "AtFailpoint", "Death", "TrialReport", "Trials", "random_deaths"]

_KILLED = -9
_LOG_BYTES = 3000
_LOOK_S = 0.01  # between two looks whether a life has begun


class Death(ABC):
    """The time at which a life is ended."""

    @property
    @abstractmethod
    def environment(self) -> Mapping[str, str]:
        """Environment variables of the process."""

    @abstractmethod
    def end(self, life: Life, journal: Journal, limit_s: float) -> int | None:
        """End it; its exit code. None: it neither ended nor was killed within the limit."""

    @abstractmethod
    def missed(self, code: int) -> str:
        """Return the problem if the life ended by itself with code 0; empty if that may happen."""


@final
@dataclass(frozen=True)
class AtFailpoint(Death):
    """The process kills itself when it comes to a failpoint for the `count`-th time."""

    name: str
    count: int = 1

    @property
    def environment(self) -> Mapping[str, str]:
        return {FAILPOINT_VARIABLE: f"{self.name}:{self.count}"}

    def end(self, life: Life, journal: Journal, limit_s: float) -> int | None:
        return life.exit_code(limit_s)

    def missed(self, code: int) -> str:
        return f"it must come to the failpoint {self.name} {self.count} times, but did not"


@final
@dataclass(frozen=True)
class AfterSeconds(Death):
    """The process is killed so long after its start, unless it has ended."""

    seconds: float

    @property
    def environment(self) -> Mapping[str, str]:
        return {}

    def end(self, life: Life, journal: Journal, limit_s: float) -> int | None:
        code = life.exit_code(self.seconds)
        if code is None:
            life.kill()
            code = life.exit_code(limit_s)
        return code

    def missed(self, code: int) -> str:
        return ""


@final
@dataclass(frozen=True)
class AfterBegin(Death):
    """As `AfterSeconds`, but counted from `Journal.begins`: for programs that start for long."""

    seconds: float

    @property
    def environment(self) -> Mapping[str, str]:
        return {}

    def end(self, life: Life, journal: Journal, limit_s: float) -> int | None:
        latest = time.monotonic() + limit_s
        while not journal.has_begun(life.pid) and time.monotonic() < latest:
            code = life.exit_code(_LOOK_S)
            if code is not None:
                return code
        return AfterSeconds(self.seconds).end(life, journal, limit_s)

    def missed(self, code: int) -> str:
        return ""


def random_deaths(
    rng: random.Random, whole_s: float, most: int = 3, kind: type[AfterSeconds | AfterBegin] = AfterSeconds
) -> Iterator[Death]:
    """One to `most` deaths within the time that an undisturbed life takes, or its work."""
    for _ in range(rng.randint(1, most)):
        yield kind(rng.uniform(0.0, whole_s))


@final
@dataclass
class TrialReport:
    """The result of trials.

    Attributes:
        trials: How many programs were run to their end.
        kills: How many lives were ended on the way.
        problems: What was not as in the undisturbed run; empty is good.
    """

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
        self,
        lives: Lives,
        program: TrialProgram,
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        power_fails: bool = False,
    ) -> None:
        self._lives = lives
        self._program = program
        self._folder = folder
        self._environment = dict(environment or {})
        self._power_fails = power_fails
        self._number = 0

    def undisturbed(self) -> Account:
        """Return the result of the program if nobody kills it.

        Raises:
            AssertionError: It does not come to its end.
        """
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
        trial = self._trial
        journal = Journal(trial)
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
        problem = death.missed(code) if code == 0 else self._failure(life, code)
        if problem:
            report.problems.append(problem)
        return True

    def _begin(self, environment: Mapping[str, str]) -> Life:
        own = {JOURNAL_VARIABLE: str(self._trial)}
        if self._power_fails:
            own[FLUSHES_VARIABLE] = str(self._notes)
        return self._lives.begin(self._program, {**self._environment, **own, **environment}, self._trial / "log")

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
