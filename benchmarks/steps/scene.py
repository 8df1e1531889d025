"""What a contender gets, and what it makes of it. Imported in every environment: the standard library alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

Run = Callable[[int], float]
"""Repeats something so many times. Gives the seconds of all of them together."""


@dataclass(frozen=True)
class Scene:
    """The place in which one contender does one workload.

    Attributes:
        workload: Its name.
        folder: Where the generated data lies.
        ranks: Replicas, members of a group, or workers.
        target_s: Seconds that a pass shall take; 0 for passes of one repetition.
        servers: Parameter servers beside them.
        resources: Closed after the last pass: servers, clusters, strategies.
    """

    workload: str
    folder: Path
    ranks: int = 2
    target_s: float = 2.0
    servers: int = 0
    resources: ExitStack = field(default_factory=ExitStack)


MakeRuns = Callable[[Scene], Mapping[str, Run]]
"""What a contender's module has under the name `make_runs`."""


def timed(action: Callable[[], object]) -> float:
    """Seconds of an action."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def repetitions(run: Run, target_s: float, now: Callable[[], float] = time.perf_counter) -> int:
    """How many repetitions take about `target_s` seconds by the clock; finding out warms up, too."""
    if target_s <= 0:
        return 1
    run(2)  # what is compiled, traced or shipped once
    count, seconds = 1, 0.0
    while seconds < target_s / 3:
        count *= 4 if seconds < target_s / 12 else 2
        seconds = min(_clocked(run, count, now) for _ in range(2))  # one of them may meet a hiccup
    return max(2, round(count * target_s / seconds))


def _clocked(run: Run, count: int, now: Callable[[], float]) -> float:
    start = now()
    run(count)
    return now() - start


def again(action: Callable[[], object], count: int) -> None:
    """So many times, one after the other."""
    for _ in range(count):
        action()
