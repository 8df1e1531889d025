"""Values of many passes, their medians, and ratios. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from benchmarks.pipelines.workload import Workload


@dataclass
class Outcome:
    """What one contender reached in one workload.

    Attributes:
        label: The contender.
        values: One a pass, in the workload's unit.
        rows: Rows that a pass saw, where rows are counted.
        version: Of the library.
        problem: Why there are no values.
    """

    label: str
    values: list[float] = field(default_factory=list)
    rows: int | None = None
    version: str = ""
    problem: str = ""

    def add(self, result: float, seconds: float, *, is_timed: bool) -> None:
        """One more pass."""
        if is_timed:
            self.rows = int(result)
            self.values.append(result / seconds)
        else:
            self.values.append(result)

    @property
    def median(self) -> float | None:
        """The middle value, None without values."""
        return statistics.median(self.values) if self.values else None

    @property
    def spread(self) -> float | None:
        """(largest - smallest) / median: how restless the machine was."""
        median = self.median
        return (max(self.values) - min(self.values)) / median if median else None


@dataclass(frozen=True)
class Comparison:
    """All contenders of one workload; the first one is compared with each of the others."""

    workload: Workload
    outcomes: tuple[Outcome, ...]

    def ratio_to(self, other: Outcome) -> float | None:
        """How many times better the first contender is; None where one of the two has no value."""
        mine, others = self.outcomes[0].median, other.median
        if not mine or not others:
            return None
        return others / mine if self.workload.smaller_is_better else mine / others

    def disagreements(self) -> list[str]:
        """Contenders that saw another number of rows than the first one: they did not do the same work."""
        expected = self.outcomes[0].rows
        return [
            f"{outcome.label} saw {outcome.rows:,} rows, {self.outcomes[0].label} saw {expected:,}"
            for outcome in self.outcomes[1:]
            if None not in (expected, outcome.rows) and outcome.rows != expected
        ]

    def as_json(self) -> dict[str, Any]:
        """Everything, for a file."""
        return {
            "workload": self.workload.name,
            "description": self.workload.description,
            "unit": self.workload.unit,
            "smaller_is_better": self.workload.smaller_is_better,
            "disagreements": self.disagreements(),
            "contenders": {outcome.label: self._one_as_json(outcome) for outcome in self.outcomes},
        }

    def _one_as_json(self, outcome: Outcome) -> dict[str, Any]:
        return {
            "version": outcome.version,
            "values": outcome.values,
            "median": outcome.median,
            "spread": outcome.spread,
            "ratio": self.ratio_to(outcome),
            "rows": outcome.rows,
            "problem": outcome.problem,
        }
