"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["parser_for"]

_RESULTS = Path(__file__).parent / "results"


def parser_for(name: str, description: str, workloads: Iterable[str], *, limit_s: float) -> argparse.ArgumentParser:
    """What every comparison understands.

    Args:
        name: Of the package below `benchmarks`, and of the file of its results.
        description: Of what it measures.
        workloads: Names that `--only` takes.
        limit_s: Seconds that one pass may take, unless something else is asked for.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "raydist-benchmarks"
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(workloads))
    parser.add_argument("--repeat", type=int, default=5, help="timed passes of each contender")
    parser.add_argument("--smoke", action="store_true", help="little work and one pass: to see that everything runs")
    parser.add_argument("--peer-python", help="interpreter that has the peers; without it the others run alone")
    parser.add_argument("--limit", type=float, default=limit_s, metavar="S", help="seconds that one pass may take")
    parser.add_argument("--cache", type=Path, default=cache, help="folder of generated data")
    parser.add_argument("--json", type=Path, default=_RESULTS / f"{name}.json")
    return parser
