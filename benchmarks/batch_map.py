"""What a map of whole batches costs beyond its function: `python -m benchmarks.batch_map`.

Passes over batches in memory, in turns: without the map, with it, with it and every `AUTOTUNE`, and the function alone
on the same arrays.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import raydist as rd
from benchmarks.quiet import await_quiet

SIZES = (64 << 10, 256 << 10, 1 << 20)
BAR_US = 30.0
_WIDTH = 256  # float32: a row has 1 KB
_HEADING = "| batch | function us | beyond it us | with AUTOTUNE us |\n|---|---|---|---|"

Array = np.ndarray[Any, np.dtype[np.float32]]


def doubled(batch: Any) -> Any:
    """The function: as much work as a scaling of pixels."""
    return batch * 2.0


@dataclass(frozen=True)
class Batches:
    """Rows in memory, cut into batches, several times over.

    Attributes:
        data: (rows, 256).
        batch_bytes: Of one batch.
        num_rounds: How often all rows come.
    """

    data: Array
    batch_bytes: int
    num_rounds: int

    @property
    def rows(self) -> int:
        """Of a batch."""
        return self.batch_bytes // (4 * _WIDTH)

    @property
    def count(self) -> int:
        """Batches of a pass."""
        return len(self.data) // self.rows * self.num_rounds

    def plain(self) -> rd.Dataset:
        return rd.Dataset.from_tensor_slices(self.data).batch(self.rows, drop_remainder=True).repeat(self.num_rounds)

    def mapped(self) -> rd.Dataset:
        return self.plain().map(doubled)

    def tuned(self) -> rd.Dataset:
        return self.plain().map(doubled, num_parallel_calls=rd.AUTOTUNE).prefetch(rd.AUTOTUNE)

    def function_s(self) -> float:
        """Seconds of the function for all batches; the last result is held meanwhile, as in a loop over a dataset."""
        held: Array | None = None
        parts = [self.data[start : start + self.rows] for start in range(0, len(self.data), self.rows)]
        began = time.perf_counter()
        for _ in range(self.num_rounds):
            for part in parts:
                held = doubled(part)
        seconds = time.perf_counter() - began
        del held
        return seconds


@dataclass(frozen=True)
class Costs:
    """Microseconds a batch, of each pass.

    Attributes:
        batch_bytes: Of one batch.
        function: Of the function alone.
        mapped: Of the map, beyond the function.
        tuned: Of the map and the prefetch with AUTOTUNE, beyond the function.
    """

    batch_bytes: int
    function: tuple[float, ...]
    mapped: tuple[float, ...]
    tuned: tuple[float, ...]

    def __str__(self) -> str:
        function, mapped, tuned = (statistics.median(values) for values in (self.function, self.mapped, self.tuned))
        shown = [f"{value:.0f}{'' if value <= BAR_US else f' (ABOVE {BAR_US:.0f})'}" for value in (mapped, tuned)]
        return f"| {self.batch_bytes >> 10} KB | {function:.0f} | {' | '.join(shown)} |"


def measure(batches: Batches, repeat: int, *, wait: Callable[[], object] = await_quiet) -> Costs:
    """Passes in turns; the first ones are not counted."""
    datasets = [batches.plain(), batches.mapped(), batches.tuned()]
    rounds = []
    for _ in range(repeat + 1):
        wait()
        rounds.append([batches.function_s(), *map(seconds_of_a_pass, datasets)])
    per_batch = [[1e6 * seconds / batches.count for seconds in one] for one in rounds[1:]]
    return Costs(
        batches.batch_bytes,
        tuple(function for function, *_ in per_batch),
        tuple(mapped - plain - function for function, plain, mapped, _ in per_batch),
        tuple(tuned - plain - function for function, plain, _, tuned in per_batch),
    )


def seconds_of_a_pass(dataset: rd.Dataset) -> float:
    began = time.perf_counter()
    for _ in dataset.as_numpy_iterator():
        pass
    return time.perf_counter() - began


def main(args: Sequence[str] | None = None) -> list[Costs]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch_map", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="few batches, once: to see that they run")
    parser.add_argument("--repeat", type=int, default=7, help="passes of each; the median counts")
    parser.add_argument("--megabytes", type=int, default=16, help="of rows in memory; more are colder to the caches")
    options = parser.parse_args(args)
    megabytes, num_rounds, repeat = (2, 1, 1) if options.smoke else (options.megabytes, 24, options.repeat)
    data = np.ones((megabytes << 10, _WIDTH), np.float32)
    print(_HEADING)
    found = []
    for size in SIZES:
        wait: Callable[[], object] = (lambda: None) if options.smoke else await_quiet
        found.append(measure(Batches(data, size, num_rounds), repeat, wait=wait))
        print(found[-1], flush=True)
    return found


if __name__ == "__main__":
    main()
