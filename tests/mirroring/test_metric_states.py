"""Metrics accumulate on every replica and read as one on the driver."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torchmetrics.classification import BinaryAUROC, BinaryConfusionMatrix, MulticlassAccuracy
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef

from raydist.mirroring.metric_states import state_names
from raydist.mirroring.replica import MirrorReplica
from raydist.values import PerReplica
from tests.mirroring.in_process import Mirror

SCORES = torch.tensor([0.1, 0.9, 0.8, 0.3, 0.6, 0.2, 0.7])
LABELS = torch.tensor([0, 1, 0, 0, 1, 1, 1])
UNEVEN = [slice(0, 5), slice(5, 7)]


def split(values: torch.Tensor) -> PerReplica:
    return PerReplica([values[part] for part in UNEVEN])


class Everything(torchmetrics.Metric):
    """A state of every kind."""

    total: torch.Tensor
    mean: torch.Tensor
    top: torch.Tensor
    low: torch.Tensor
    seen: list[torch.Tensor]
    apart: list[torch.Tensor]
    added: torch.Tensor
    largest: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")
        self.add_state("top", torch.tensor(-9.0), dist_reduce_fx="max")
        self.add_state("low", torch.tensor(9.0), dist_reduce_fx="min")
        self.add_state("seen", [], dist_reduce_fx="cat")
        self.add_state("apart", [], dist_reduce_fx=None)
        self.add_state("added", torch.zeros(2), dist_reduce_fx=lambda stacked: stacked.sum(0))
        self.add_state("largest", torch.zeros(2), dist_reduce_fx=lambda stacked: stacked.amax(0))

    def update(self, values: torch.Tensor) -> None:
        self.total += values.sum()
        self.mean += values.mean()
        self.top = torch.maximum(self.top, values.max())
        self.low = torch.minimum(self.low, values.min())
        self.seen.append(values)
        self.apart.append(values.sum())
        self.added += values.sum()
        self.largest = torch.maximum(self.largest, values.max())

    def compute(self) -> dict[str, torch.Tensor]:
        found = {name: getattr(self, name) for name in ("total", "mean", "top", "low", "added", "largest")}
        return found | {
            name: torch.cat([torch.atleast_1d(x) for x in getattr(self, name)]) for name in ("seen", "apart")
        }


def make(mirror: Mirror, kind: Any) -> Any:
    with mirror.scope():
        return kind()


@pytest.mark.parametrize(
    "kind",
    [
        BinaryAUROC,
        BinaryConfusionMatrix,
        MeanSquaredError,
        PearsonCorrCoef,
        torchmetrics.MeanMetric,
        torchmetrics.SumMetric,
        torchmetrics.MaxMetric,
        torchmetrics.MinMetric,
        torchmetrics.CatMetric,
    ],
)
def test_merged_over_replicas(kind: Any) -> None:
    mirror = Mirror()
    metric, plain = make(mirror, kind), kind()
    arguments = (SCORES,) if issubclass(kind, torchmetrics.aggregation.BaseAggregator) else (SCORES, LABELS)
    if kind is PearsonCorrCoef:
        arguments = (SCORES, LABELS.float())

    def step(*batch: torch.Tensor) -> None:
        metric.update(*batch)

    for _ in range(2):
        mirror.run(step, *(split(values) for values in arguments))
        for part in UNEVEN:
            plain.update(*(values[part] for values in arguments))
        computed, expected = metric.compute(), plain.compute()
        if kind is torchmetrics.CatMetric:
            computed, expected = computed.sort().values, expected.sort().values
        torch.testing.assert_close(computed, expected)


def test_reading_does_not_count_twice() -> None:
    mirror = Mirror()
    metric = make(mirror, torchmetrics.SumMetric)
    step = lambda value: metric.update(value)  # noqa: E731
    mirror.run(step, PerReplica([1.0, 2.0]))
    assert metric.compute().item() == 3.0
    mirror.run(step, PerReplica([1.0, 2.0]))
    assert mirror.bytes_of_last["writes"] < 300
    assert metric.compute().item() == 6.0


def test_reset_reaches_all() -> None:
    mirror = Mirror()
    metric = make(mirror, torchmetrics.SumMetric)
    step = lambda value: metric.update(value)  # noqa: E731
    mirror.run(step, PerReplica([1.0, 2.0]))
    metric.reset()
    mirror.run(step, PerReplica([10.0, 20.0]))
    assert metric.compute().item() == 30.0


@pytest.mark.parametrize(("kind", "expected"), [(torchmetrics.SumMetric, 106.0), (torchmetrics.MaxMetric, 100.0)])
def test_update_on_the_driver_counts_once(kind: Any, expected: float) -> None:
    mirror = Mirror()
    metric = make(mirror, kind)
    step = lambda value: metric.update(value)  # noqa: E731
    mirror.run(step, PerReplica([1.0, 2.0]))
    metric.update(100.0)
    mirror.run(step, PerReplica([1.0, 2.0]))
    assert metric.compute().item() == expected


def test_collection_with_shared_states() -> None:
    mirror = Mirror()

    def named() -> torchmetrics.MetricCollection:
        return torchmetrics.MetricCollection(
            {"micro": MulticlassAccuracy(2, average="micro"), "macro": MulticlassAccuracy(2), "mse": MeanSquaredError()}
        )

    metrics, plain = make(mirror, named), named()
    guesses = (SCORES > 0.5).long()

    def step(guess: torch.Tensor, label: torch.Tensor) -> None:
        metrics.update(guess, label)

    for _ in range(2):
        mirror.run(step, split(guesses), split(LABELS))
        for part in UNEVEN:
            plain.update(guesses[part], LABELS[part])
    torch.testing.assert_close(metrics.compute(), plain.compute())


def test_forward_in_the_step_returns_the_local_value() -> None:
    mirror = Mirror()
    metric = make(mirror, torchmetrics.MeanMetric)
    assert mirror.run(lambda value: metric(value).item(), PerReplica([1.0, 3.0])) == [1.0, 3.0]
    assert metric.compute().item() == 2.0


@pytest.mark.parametrize("source", [0, 1])
@pytest.mark.parametrize(
    "kind",
    [
        Everything,
        torchmetrics.SumMetric,
        torchmetrics.MeanMetric,
        torchmetrics.MaxMetric,
        torchmetrics.MinMetric,
        torchmetrics.CatMetric,
        lambda: torchmetrics.MetricCollection([torchmetrics.SumMetric(), torchmetrics.MeanMetric()]),
    ],
)
def test_a_failed_step_loses_nothing_and_doubles_nothing(kind: Any, source: int) -> None:
    failing, fine = Mirror(3), Mirror(3)
    metrics = [make(failing, kind), make(fine, kind)]
    scores = [torch.tensor([rank, 1.0, 2.0 * rank]) for rank in range(3)]

    def update(metric: Any, values: torch.Tensor) -> None:
        metric.update(values)

    def fail(metric: Any, values: torch.Tensor) -> None:
        if values[0] == source:
            raise ZeroDivisionError

    for _ in range(3):
        failing.run(update, metrics[0], PerReplica(scores))
        fine.run(update, metrics[1], PerReplica(scores))
        with pytest.raises(ZeroDivisionError):
            failing.run(fail, metrics[0], PerReplica(scores))
        failing.driver.reset(source)
        torch.testing.assert_close(metrics[0].compute(), metrics[1].compute())


def test_what_replicas_counted_in_a_step_that_failed_on_another_stays_theirs() -> None:
    mirror = Mirror(3)
    metric = make(mirror, torchmetrics.SumMetric)

    def step(value: float) -> None:
        if value > 50:
            raise ZeroDivisionError
        metric.update(value)

    mirror.run(step, PerReplica([1.0, 2.0, 3.0]))
    with pytest.raises(ZeroDivisionError):
        mirror.run(step, PerReplica([10.0, 99.0, 99.0]))
    mirror.driver.reset()
    assert metric.compute().item() == 16.0


@pytest.mark.parametrize("kind", [Everything, torchmetrics.SumMetric, torchmetrics.MeanMetric, torchmetrics.MaxMetric])
def test_a_replica_that_has_counted_nothing_yet_adds_nothing(kind: Any) -> None:
    mirror = Mirror(2)
    metric, plain = make(mirror, kind), kind()
    mirror.run(lambda values: metric.update(values), torch.tensor([1.0, 3.0]))
    mirror.link.replicas[1] = MirrorReplica(1)
    mirror.driver.reset()
    plain.update(torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(metric.compute(), plain.compute())


@pytest.mark.parametrize("kind", [Everything, torchmetrics.SumMetric, torchmetrics.MaxMetric])
def test_what_the_driver_writes_is_read_again(kind: Any) -> None:
    mirror = Mirror(3)
    metric, plain = make(mirror, kind), kind()
    mirror.run(lambda values: metric.update(values), torch.tensor([1.0]))
    metric.reset()
    for values in (torch.tensor([1.0, 3.0]), torch.tensor([2.0])):
        metric.update(values)
        plain.update(values)
    mirror.run(lambda: metric.training)
    torch.testing.assert_close(metric.compute(), plain.compute())


def test_held_states_come_back() -> None:
    mirror = Mirror()
    metric = make(mirror, torchmetrics.SumMetric)
    step = lambda value: metric.update(value)  # noqa: E731
    mirror.run(step, PerReplica([1.0, 2.0]))
    held = mirror.replicas[1].hold_metrics()
    mirror.run(step, PerReplica([1.0, 99.0]))
    mirror.replicas[1].restore_metrics(held)
    assert metric.compute().item() == 4.0


def test_only_metrics_have_states() -> None:
    assert state_names(torch.nn.Linear(1, 1)) == ()
    assert state_names(torchmetrics.SumMetric()) == ("sum_value",)
