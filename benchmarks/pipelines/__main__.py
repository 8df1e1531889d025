"""`python -m benchmarks.pipelines [--only NAME ...] [--repeat N] [--smoke] [--peer-python PATH]`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.pipelines import generate, report
from benchmarks.pipelines.results import Comparison
from benchmarks.pipelines.runner import Runner, Settings
from benchmarks.pipelines.workload import Workload
from benchmarks.pipelines.workloads import WORKLOADS

RESULTS = Path(__file__).parent.parent / "results"


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "raydist-benchmarks"
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipelines", description="raydist beside its peers.")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[workload.name for workload in WORKLOADS])
    parser.add_argument("--repeat", type=int, default=5, help="timed passes of each contender")
    parser.add_argument("--smoke", action="store_true", help="little data and one pass: to see that everything runs")
    parser.add_argument("--peer-python", help="interpreter that has the peers; without it raydist runs alone")
    parser.add_argument("--limit", type=float, default=300.0, metavar="S", help="seconds that one pass may take")
    parser.add_argument("--cache", type=Path, default=cache, help="folder of generated data")
    parser.add_argument("--json", type=Path, default=RESULTS / "pipelines.json")
    return parser.parse_args(args)


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
