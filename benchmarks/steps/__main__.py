"""`python -m benchmarks.steps [--only NAME ...] [--repeat N] [--smoke] [--peer-python PATH]`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.arguments import parser_for
from benchmarks.pipelines import generate
from benchmarks.pipelines.report import machine
from benchmarks.pipelines.runner import Settings
from benchmarks.steps import report
from benchmarks.steps.figures import Figures, Table
from benchmarks.steps.runner import StepRunner
from benchmarks.steps.workloads import WORKLOADS, Workload


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    names = [workload.name for workload in WORKLOADS]
    return parser_for("steps", "Steps of raydist and its peers.", names, limit_s=120.0).parse_args(args)


def chosen(names: Sequence[str] | None) -> list[Workload]:
    return [workload for workload in WORKLOADS if names is None or workload.name in names]


def run(workloads: Sequence[Workload], settings: Settings, json_file: Path, console: Console) -> Figures:
    """Every workload in turn; the file is complete after each of them."""
    about = machine(smoke=settings.smoke, repeat=settings.repeat, images=generate.images_are())
    tables: list[Table] = []
    generate.ensure("mnist", settings.folder, smoke=settings.smoke)
    with console.status("") as status, StepRunner(settings, status.update) as runner:
        for workload in workloads:
            tables.append(runner.measure(workload))
            console.print(f"\n{workload.description}:\n\n{report.table_of(tables[-1])}", soft_wrap=True, markup=False)
            report.write_json(json_file, about, Figures(tuple(tables)))
    figures = Figures(tuple(tables))
    console.print(f"\nThe project's own bars:\n\n{report.bars_of(figures)}", soft_wrap=True, markup=False)
    console.print(f"\n{about['images']}. Written to {json_file}", soft_wrap=True)
    return figures


def main() -> None:
    args = parse_args()
    repeat = 1 if args.smoke else args.repeat
    settings = Settings(args.cache, args.peer_python, repeat, args.limit, args.smoke)
    run(chosen(args.only), settings, args.json, Console())


if __name__ == "__main__":
    main()
