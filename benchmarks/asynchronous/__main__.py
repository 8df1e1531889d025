"""`python -m benchmarks.asynchronous [--only NAME ...] [--repeat N] [--smoke] [--peer-python PATH]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.arguments import parser_for
from benchmarks.asynchronous.bars import BARS
from benchmarks.asynchronous.workloads import STUDIES, WORKLOADS
from benchmarks.pipelines import generate
from benchmarks.pipelines.contestant import Contestant, PassError
from benchmarks.pipelines.report import machine, number
from benchmarks.pipelines.runner import Settings
from benchmarks.steps import report
from benchmarks.steps.figures import Figures
from benchmarks.steps.runner import StepRunner

NAMES = (*(workload.name for workload in WORKLOADS), *STUDIES)


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_for("asynchronous", "Updates of raydist's workers and of its peers'.", NAMES, limit_s=240.0)
    return parser.parse_args(args)


class Measuring:
    """Does one thing after the other; the file is complete after each of them.

    Args:
        settings: How a run is done.
        json_file: Where the figures go.
        console: Where tables go.
    """

    def __init__(self, settings: Settings, json_file: Path, console: Console) -> None:
        self._settings = settings
        self._json_file = json_file
        self._console = console
        self._about: dict[str, Any] = {}

    def run(self, names: Sequence[str]) -> Figures:
        """Workloads and studies of these names."""
        settings = self._settings
        self._about = machine(smoke=settings.smoke, repeat=settings.repeat, images=generate.images_are())
        generate.ensure("mnist", settings.folder, smoke=settings.smoke)
        figures = self._workloads(names)
        for study in (study for study in STUDIES if study in names):
            figures = self._study(study, figures)
        bars = report.bars_of(figures, BARS)
        self._print(f"The project's own bars:\n\n{bars}\n\n{self._about['images']}. Written to {self._json_file}")
        return figures

    def _workloads(self, names: Sequence[str]) -> Figures:
        figures = Figures(())
        with self._console.status("") as status, StepRunner(self._settings, status.update) as runner:
            for workload in (workload for workload in WORKLOADS if workload.name in names):
                table = runner.measure(workload)
                figures = Figures((*figures.tables, table))
                self._print(f"{workload.description}:\n\n{report.table_of(table)}")
                self._write(figures)
        return figures

    def _study(self, study: str, figures: Figures) -> Figures:
        """In a process of its own, whose Ray ends with it."""
        log = self._settings.cache / "logs" / f"asynchronous_{study}.log"
        command = (sys.executable, "-m", "benchmarks.asynchronous.studies")
        with closing(Contestant(command, log, self._settings.limit_s)) as process:
            try:
                findings = process.request({"study": study, "smoke": self._settings.smoke})["findings"]
            except PassError as error:
                self._print(f"{study}: not available: {error}")
                return figures
        self._print(f"{study}: " + ", ".join(f"{name} {number(value)}" for name, value in findings.items()))
        found = Figures(figures.tables, {**figures.findings, **findings})
        self._write(found)
        return found

    def _print(self, text: str) -> None:
        self._console.print(f"\n{text}", soft_wrap=True, markup=False)

    def _write(self, figures: Figures) -> None:
        report.write_json(self._json_file, self._about, figures, BARS)


def main() -> None:
    args = parse_args()
    repeat = 1 if args.smoke else args.repeat
    settings = Settings(args.cache, args.peer_python, repeat, args.limit, args.smoke)
    Measuring(settings, args.json, Console()).run(args.only or NAMES)


if __name__ == "__main__":
    main()
