"""Taking turns: the first pass of every line, then the second of every line, and so on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from benchmarks.pipelines.contestant import Contestant, PassError
from benchmarks.pipelines.results import Outcome
from benchmarks.pipelines.runner import Settings
from benchmarks.steps.figures import Measured, Table
from benchmarks.steps.workloads import Line, Workload

SMOKE_TARGET_S = 0.02


class StepRunner:
    """Keeps one process for each contender while workloads need it, and ends them all when it is left.

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

    def measure(self, workload: Workload) -> Table:
        """All lines of a workload."""
        table = Table(workload, tuple(Measured(line, Outcome(line.name)) for line in workload.lines))
        contenders = {line.contender: line for line in workload.lines}
        self._end_all_but(contenders)
        self._report(f"{workload.name}: preparing")
        self._prepare_all(workload, list(contenders.values()), table)
        for number in range(1 + min(self._settings.repeat, workload.most_repeats)):
            for one in table.lines:
                self._report(f"{workload.name}: pass {number} of {one.line.name}")
                self._pass(one, table)
        return table

    def _prepare_all(self, workload: Workload, lines: Sequence[Line], table: Table) -> None:
        """All contenders at once: nothing is timed yet, and most of it is waiting."""
        request = {
            "workload": workload.name,
            "folder": str(self._settings.folder),
            "ranks": workload.ranks,
            "servers": workload.servers,
            "target_s": min(workload.target_s, SMOKE_TARGET_S) if self._settings.smoke else workload.target_s,
        }
        jobs = [(line, self._contestant(line)) for line in lines if not self._leaves_out(line, table)]
        with ThreadPoolExecutor(max(1, len(jobs))) as pool:
            problems = pool.map(lambda job: self._problem(job[1], request), jobs)
        for (line, _), problem in zip(jobs, problems, strict=True):
            if problem:
                self._give_up(line.contender, table, problem)

    def _leaves_out(self, line: Line, table: Table) -> bool:
        absent = line.is_peer and self._settings.peer_python is None
        if absent:
            self._give_up(line.contender, table, "left out")
        return absent

    def _problem(self, contestant: Contestant, request: dict[str, Any]) -> str:
        try:
            contestant.request(request)
        except PassError as error:
            return str(error)
        return ""

    def _pass(self, one: Measured, table: Table) -> None:
        """The first one is a rehearsal, whose answer is empty."""
        if one.outcome.problem:
            return
        contestant = self._contestant(one.line)
        self._pause_all_but(contestant)
        try:
            answer = contestant.request({"run": one.line.run})
        except PassError as error:
            self._give_up(one.line.contender, table, str(error))
        else:
            if answer:
                one.add(answer)

    def _give_up(self, contender: str, table: Table, problem: str) -> None:
        for one in table.lines:
            if one.line.contender == contender:
                one.outcome.problem = problem

    def _contestant(self, line: Line) -> Contestant:
        """Its process is started by its first request."""
        if line.contender not in self._contestants:
            python = self._settings.peer_python if line.is_peer else sys.executable
            command = (str(python), "-m", "benchmarks.steps.worker", line.module)
            log = self._settings.cache / "logs" / f"steps_{line.contender}.log"
            contestant = Contestant(command, log, self._settings.limit_s)
            self._contestants[line.contender] = contestant
            self._stack.callback(contestant.close)
        return self._contestants[line.contender]

    def _pause_all_but(self, measured: Contestant) -> None:
        """A Ray cluster that only waits takes a tenth of a core, of whatever is measured beside it."""
        for contestant in self._contestants.values():
            if contestant is not measured:
                contestant.pause()

    def _end_all_but(self, contenders: Collection[str]) -> None:
        """Even an idle Ray costs something."""
        for name, contestant in self._contestants.items():
            if name not in contenders:
                contestant.close()
