"""The bars that the project has set itself, and which of them a run meets."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.steps.cpu import DRIVER, GCS, INPUT, OTHER, RAYLET
from benchmarks.steps.figures import Figures
from benchmarks.steps.workloads import BARE, COMMUNICATOR, DDP, ONE_REPLICA, OWN, STOCK, STRATEGY

Value = Callable[[Figures], float | None]


@dataclass(frozen=True)
class Bar:
    """A bar: what must be reached.

    Attributes:
        name: A letter and a number.
        what: In words.
        value: Takes it from the figures; None where its parts were not measured.
        limit: What it is compared with.
        unit: Of both.
        at_least: Whether larger is better.
    """

    name: str
    what: str
    value: Value
    limit: float
    unit: str = "x"
    at_least: bool = False

    @property
    def goal(self) -> str:
        """Limit and unit."""
        return f"{'>=' if self.at_least else '<='} {self.limit:g} {self.unit}"

    def verdict(self, measured: float | None) -> str:
        """In a word or two."""
        if measured is None:
            return "not measured"
        return "met" if (measured >= self.limit if self.at_least else measured <= self.limit) else "not met"


def _ratio(workload: str, mine: str, others: str, *, scale: float = 1.0) -> Value:
    """The time of one line as a multiple of another's."""

    def value(figures: Figures) -> float | None:
        above, below = figures.median(workload, mine), figures.median(workload, others)
        return scale * above / below if above is not None and below else None

    return value


def times_faster(workload: str, mine: str, others: str, variant: str = "") -> Value:
    """The speed of one line as a multiple of another's."""

    def value(figures: Figures) -> float | None:
        below, above = figures.median(workload, mine, variant), figures.median(workload, others, variant)
        return above / below if above is not None and below else None

    return value


def _milliseconds(workload: str, label: str, *, scale: float = 1.0) -> Value:
    def value(figures: Figures) -> float | None:
        median = figures.median(workload, label)
        return None if median is None else scale * median

    return value


def _added_us(variant: str) -> Value:
    """Median of the differences of passes that came one after the other: input costs vary more than what is added."""

    def value(figures: Figures) -> float | None:
        mine, bare = (figures.find("one_device", label, variant) for label in (STRATEGY, BARE))
        pairs = zip(mine.outcome.values, bare.outcome.values, strict=False) if mine and bare else ()
        differences = [1000 * (above - below) for above, below in pairs]
        return statistics.median(differences) if differences else None

    return value


def _all_reduce_bars(name: str, ranks: int, limits: tuple[float, ...]) -> list[Bar]:
    workload = f"allreduce_{ranks}"
    return [
        Bar(
            name,
            f"all-reduce, {ranks} ranks, {size}, {label}: speed against {STOCK}",
            times_faster(workload, label, STOCK, size),
            limit,
            at_least=True,
        )
        for size, limit in zip(("4 KB", "1 MB", "10 MB", "100 MB"), limits, strict=True)
        for label in (OWN, COMMUNICATOR)
    ]


def _step_bars(name: str, workload: str, limits: dict[str, float]) -> list[Bar]:
    return [
        Bar(name, f"{workload}, {way}: time against {DDP}", _ratio(workload, f"raydist, {way}", DDP), limit)
        for way, limit in limits.items()
    ]


def _cpu_beside_replicas(way: str) -> Bar:
    def value(figures: Figures) -> float | None:
        return figures.cpu_ms("mlp16", f"raydist, {way}", (DRIVER, INPUT, RAYLET, GCS, OTHER))

    return Bar("P6", f"mlp16, {way}: CPU of everything but the replicas, a step", value, 1.2, "ms")


BARS = (
    *_all_reduce_bars("P1", 2, (15, 8, 2.5, 2.5)),
    *_all_reduce_bars("P2", 4, (8, 4, 2, 1.7)),
    *_step_bars("P3", "mlp1024", {"loop": 0.75, "run": 0.80}),
    *_step_bars("P4", "cnn", {"loop": 1.0, "run": 1.05}),
    Bar("P4", f"cnn, loop: time against {ONE_REPLICA}", _ratio("cnn", "raydist, loop", ONE_REPLICA), 0.85),
    *_step_bars("P5", "mlp16", {"same batch": 0.35, "loop": 0.7, "run": 1.1, "read": 1.5}),
    *_step_bars("C2", "mlp1024_nodes", {"loop": 1.0, "run": 1.0}),
    _cpu_beside_replicas("run"),
    _cpu_beside_replicas("loop"),
    Bar(
        "P7", "drawing batches of 128 x 3 KB in 2 replicas", _milliseconds("mlp16", "raydist, drawing alone"), 0.8, "ms"
    ),
    Bar("P8", "OneDeviceStrategy, steps of 0.5 ms: CPU added a step", _added_us("0.5 ms"), 25, "us"),
    Bar("P8", "OneDeviceStrategy, steps of 5 ms: CPU added a step", _added_us("5 ms"), 50, "us"),
    Bar("P14", "to the first step, Ray is up", _milliseconds("start", "raydist, Ray is up", scale=1e-3), 5, "s"),
    Bar("P14", "the same against Ray Train", _ratio("start", "raydist, Ray is up", "Ray Train, Ray is up"), 0.35),
    Bar("P14", "to the first step, from nothing", _milliseconds("start", "raydist, from nothing", scale=1e-3), 11, "s"),
)
