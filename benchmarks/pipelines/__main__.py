"""`python -m benchmarks.pipelines [--only NAME ...] [--repeat N] [--smoke] [--peer-python PATH]`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.arguments import parser_for
from benchmarks.pipelines import generate, report
from benchmarks.pipelines.results import Comparison
from benchmarks.pipelines.runner import Runner, Settings
from benchmarks.pipelines.workload import Workload
from benchmarks.pipelines.workloads import WORKLOADS


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    names = [workload.name for workload in WORKLOADS]
    return parser_for("pipelines", "raydist beside its peers.", names, limit_s=300.0).parse_args(args)


def chosen(names: Sequence[str] | None) -> list[Workload]:
    return [workload for workload in WORKLOADS if names is None or workload.name in names]


def run(workloads: Sequence[Workload], settings: Settings, json_file: Path, console: Console) -> None:
    """Every workload in turn; the file is complete after each of them."""
    about = report.machine(smoke=settings.smoke, repeat=settings.repeat, images=generate.images_are())
    comparisons: list[Comparison] = []
    with console.status("") as status, Runner(settings, status.update) as runner:
        for workload in workloads:
            for name in workload.data:
                status.update(f"{workload.name}: making {name}")
                generate.ensure(name, settings.folder, smoke=settings.smoke)
            comparisons.append(runner.compare(workload))
            console.print(report.table_of(comparisons[-1]))
            report.write_json(json_file, about, comparisons)
    console.print(f"{about['images']}. Written to {json_file}")


def main() -> None:
    args = parse_args()
    repeat = 1 if args.smoke else args.repeat
    settings = Settings(args.cache, args.peer_python, repeat, args.limit, args.smoke)
    run(chosen(args.only), settings, args.json, Console())


if __name__ == "__main__":
    main()
