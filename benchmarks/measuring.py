"""What a benchmark is, and how time is taken."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

REPETITIONS = 3


class Benchmark(Protocol):
    """Something that can be measured."""

    @property
    def name(self) -> str:
        """What is measured, as the table shows it."""

    def run(self, *, smoke: bool) -> str:
        """Measure, and say the result with its unit."""


@dataclass(frozen=True)
class Throughput:
    """Examples per second.

    Attributes:
        name: What is measured.
        num_examples: Examples of one pass.
        make_pass: From a number of examples and a folder for files, a function that reads the examples once and gives
            how many it has seen.
    """

    name: str
    num_examples: int
    make_pass: Callable[[int, Path], Callable[[], int]]

    def run(self, *, smoke: bool) -> str:
        """The best of some passes: what disturbs makes a pass slower, never faster."""
        num_examples = self.num_examples // 100 if smoke else self.num_examples
        with tempfile.TemporaryDirectory() as folder:
            read = self.make_pass(num_examples, Path(folder))
            seconds = min(seconds_of(read, num_examples) for _ in range(1 if smoke else REPETITIONS))
        return f"{num_examples / seconds:,.0f} examples/s"


def seconds_of(read: Callable[[], int], expected: int) -> float:
    start = time.perf_counter()
    seen = read()
    seconds = time.perf_counter() - start
    if seen != expected:
        raise AssertionError(f"A pass must see every example once: {expected:,} expected, {seen:,} seen.")
    return seconds
