"""Taking turns: the first pass of every contender, then the second of every contender, and so on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.pipelines.contenders import CONTENDERS, Contender
from benchmarks.pipelines.contestant import Contestant, Job, PassError
from benchmarks.pipelines.results import Comparison, Outcome
from benchmarks.pipelines.workload import Workload
from benchmarks.quiet import await_quiet


@dataclass(frozen=True)
class Settings:
    """How a run is done.

    Attributes:
        cache: Folder of generated data and of logs.
        peer_python: Interpreter of the peers' environment; None leaves them out.
        repeat: Timed passes of each contender.
        limit_s: Seconds that one pass may take.
        smoke: Little data.
    """

    cache: Path
    peer_python: str | None = None
    repeat: int = 5
    limit_s: float = 300.0
    smoke: bool = False

    @property
    def folder(self) -> Path:
        """Where the data of this size lies."""
        return self.cache / ("smoke" if self.smoke else "full")


class Runner:
    """Keeps one process for each contender over all workloads, and ends them all when it is left.

    Args:
        settings: How a run is done.
        report: Told what happens now.
    """

    def __init__(self, settings: Settings, report: Callable[[str], None] = lambda text: None) -> None:
        self._settings = settings
        self._report = report
        self._stack = ExitStack()
        self._contestants: dict[str, Contestant] = {}

    def __enter__(self) -> Self:
        (self._settings.cache / "logs").mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def compare(self, workload: Workload) -> Comparison:
        """All contenders of a workload."""
        outcomes = tuple(Outcome(label) for label in workload.contenders)
        for outcome in outcomes:
            self._report(f"{workload.name}: preparing {outcome.label}")
            self._prepare(workload, outcome)
        for number in range(self._settings.repeat):
            self._report(f"{workload.name}: pass {number + 1} of {self._settings.repeat}")
            self._take_turns(workload, outcomes)
        return Comparison(workload, outcomes)

    def _prepare(self, workload: Workload, outcome: Outcome) -> None:
        contender = CONTENDERS[outcome.label]
        if contender.is_peer and self._settings.peer_python is None:
            outcome.problem = "left out"
            return
        try:
            outcome.version = self._contestant(contender).prepare(self._job(workload, contender))
        except PassError as error:
            outcome.problem = str(error)

    def _take_turns(self, workload: Workload, outcomes: tuple[Outcome, ...]) -> None:
        for outcome in outcomes:
            if outcome.problem:
                continue
            if not self._settings.smoke:  # Ray Data ends workers after a pass: that took half of the next one's time
                await_quiet()
            try:
                outcome.add(*self._contestants[outcome.label].run(), is_timed=workload.is_timed)
            except PassError as error:
                outcome.problem = str(error)

    def _contestant(self, contender: Contender) -> Contestant:
        """Its process is started by its first workload; by the next one again if it has ended."""
        if contender.label not in self._contestants:
            python = self._settings.peer_python if contender.is_peer else sys.executable
            command = (str(python), "-m", "benchmarks.pipelines.worker", contender.module, contender.distribution)
            log = self._settings.cache / "logs" / f"{contender.label.replace(' ', '_')}.log"
            contestant = Contestant(command, log, self._settings.limit_s)
            self._contestants[contender.label] = contestant
            self._stack.callback(contestant.close)
        return self._contestants[contender.label]

    def _job(self, workload: Workload, contender: Contender) -> Job:
        return Job(
            workload=workload.name,
            folder=str(self._settings.folder),
            rows=workload.rows_for(smoke=self._settings.smoke),
            num_workers=contender.num_workers,
            num_calls=contender.num_calls,
            warm_up=workload.is_timed,
        )
