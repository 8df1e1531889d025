"""Values of many passes, their medians, and ratios. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.pipelines.results import Outcome
from benchmarks.steps.workloads import Line, Workload


@dataclass
class Measured:
    """What one line reached.

    Attributes:
        line: Which one.
        outcome: Milliseconds of a repetition, one value a pass.
        cpu: CPU milliseconds of a repetition by kind of process, one a pass.
        count: Repetitions of a pass.
    """

    line: Line
    outcome: Outcome
    cpu: list[dict[str, float]] = field(default_factory=list)
    count: int = 0

    def add(self, answer: Mapping[str, Any]) -> None:
        """One more pass."""
        self.outcome.add(answer["ms"], 1.0, is_timed=False)
        self.cpu.append(dict(answer["cpu"]))
        self.count = int(answer["count"])

    def cpu_ms(self, kinds: Iterable[str]) -> float | None:
        """Median over the passes of the CPU time of some kinds of processes together."""
        wanted = tuple(kinds)
        return statistics.median(sum(one[kind] for kind in wanted) for one in self.cpu) if self.cpu else None


@dataclass(frozen=True)
class Table:
    """All lines of one workload."""

    workload: Workload
    lines: tuple[Measured, ...]

    def ratio(self, measured: Measured, label: str) -> float | None:
        """Its time as a multiple of that of the line `label` of the same variant."""
        reference = self.find(label, measured.line.variant)
        mine, others = measured.outcome.median, reference.outcome.median if reference else None
        return mine / others if mine is not None and others else None

    def find(self, label: str, variant: str = "") -> Measured | None:
        """A line, None if there is none of that label."""
        wanted = (label, variant)
        return next((one for one in self.lines if (one.line.label, one.line.variant) == wanted), None)

    def as_json(self) -> dict[str, Any]:
        """Everything, for a file."""
        return {
            "workload": self.workload.name,
            "description": self.workload.description,
            "unit": "ms",
            "lines": {one.line.name: self._one_as_json(one) for one in self.lines},
        }

    def _one_as_json(self, one: Measured) -> dict[str, Any]:
        return {
            "values": one.outcome.values,
            "median": one.outcome.median,
            "spread": one.outcome.spread,
            "repetitions": one.count,
            "ratios": {label: self.ratio(one, label) for label in self.workload.references},
            "cpu": one.cpu,
            "problem": one.outcome.problem,
        }


@dataclass(frozen=True)
class Figures:
    """All tables of a run. What was not measured is None.

    Attributes:
        tables: One a workload.
        findings: What was found that is no time, by name.
    """

    tables: tuple[Table, ...]
    findings: Mapping[str, float] = field(default_factory=dict)

    def find(self, workload: str, label: str, variant: str = "") -> Measured | None:
        """A line of a workload."""
        table = next((table for table in self.tables if table.workload.name == workload), None)
        return table.find(label, variant) if table else None

    def median(self, workload: str, label: str, variant: str = "") -> float | None:
        """Milliseconds of a line."""
        found = self.find(workload, label, variant)
        return found.outcome.median if found else None

    def cpu_ms(self, workload: str, label: str, kinds: Iterable[str]) -> float | None:
        """CPU milliseconds of a line."""
        found = self.find(workload, label)
        return found.cpu_ms(kinds) if found else None
