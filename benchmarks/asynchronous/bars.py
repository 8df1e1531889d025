"""The bars of asynchronous training: ratios within one run, but for an accuracy."""

from __future__ import annotations

from benchmarks.asynchronous import workloads as of
from benchmarks.steps.bars import Bar, times_faster
from benchmarks.steps.figures import Figures

ACCURACY, MEMORY_RATIO = "accuracy", "server bytes per byte of the rows touched"


def _updates(name: str, workload: str, others: str, limit: float) -> Bar:
    what = f"{workload}: updates/s against {others}"
    return Bar(name, what, times_faster(workload, of.SCHEDULE, others), limit, at_least=True)


def _applied(workload: str, way: str, limit: float) -> Bar:
    what = f"{workload}, {way}: batches applied in the same time, against {of.SYNCHRONOUS} ones"
    return Bar("D5", what, times_faster(workload, way, of.SYNCHRONOUS), limit, at_least=True)


def found(figures: Figures, name: str) -> float | None:
    """What a study found."""
    return figures.findings.get(name)


BARS = (
    _updates("D1", "mlp16", of.TENSORFLOW, 2),
    _updates("D1", "mlp16", of.PLAIN_RAY, 3),
    _updates("D2", "mlp1024", of.TENSORFLOW, 1.5),
    _updates("D2", "mlp1024", of.PLAIN_RAY, 3),
    _updates("D3", "embedding", of.TENSORFLOW, 2),
    Bar("D4", f"10^9 x 16: {MEMORY_RATIO}", lambda figures: found(figures, MEMORY_RATIO), 3),
    _applied("one_slow", of.ASYNC, 3),
    _applied("one_slow", of.BACKUPS, 3),
    _applied("at_times", of.BOUNDED, 1.3),
    Bar("D6", "CNN on MNIST, 3 epochs: accuracy", lambda figures: found(figures, ACCURACY), 0.95, "", at_least=True),
)
