"""Run all benchmarks, or those whose names contain a given text: `python -m benchmarks [text ...] [--smoke]`."""

from __future__ import annotations

import argparse

from benchmarks import pipelines, steps
from benchmarks.measuring import Benchmark

BENCHMARKS: tuple[Benchmark, ...] = (*pipelines.BENCHMARKS, *steps.BENCHMARKS)


def chosen(texts: list[str]) -> list[Benchmark]:
    return [benchmark for benchmark in BENCHMARKS if not texts or any(text in benchmark.name for text in texts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", nargs="*", metavar="text", help="run benchmarks whose names contain one of these")
    parser.add_argument("--smoke", action="store_true", help="little work, once: to see that they run")
    args = parser.parse_args()
    print("| benchmark | result |\n|---|---|")
    for benchmark in chosen(args.texts):
        print(f"| {benchmark.name} | {benchmark.run(smoke=args.smoke)} |", flush=True)


if __name__ == "__main__":
    main()
