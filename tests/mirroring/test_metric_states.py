"""Metrics accumulate on every replica and read as one on the driver."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torchmetrics.classification import BinaryAUROC, BinaryConfusionMatrix, MulticlassAccuracy
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef

from raydist.mirroring.metric_states import state_names
from raydist.values import PerReplica
from tests.mirroring.in_process import Mirror

SCORES = torch.tensor([0.1, 0.9, 0.8, 0.3, 0.6, 0.2, 0.7])
LABELS = torch.tensor([0, 1, 0, 0, 1, 1, 1])
UNEVEN = [slice(0, 5), slice(5, 7)]


def split(values: torch.Tensor) -> PerReplica:
    return PerReplica([values[part] for part in UNEVEN])


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
