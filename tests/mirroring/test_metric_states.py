"""Metrics accumulate on every replica and read as one on the driver."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.classification import BinaryAUROC, BinaryConfusionMatrix, MulticlassAccuracy
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef

from raydist.core.values import PerReplica
from raydist.mirroring.lazy_states import (
    divide_states,
    merge_states,
    restore_states,
    states_for_rank,
)
from raydist.mirroring.replica import MirrorReplica
from tests.cases import case
from tests.mirroring.in_process import Mirror, rank_of

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


def collection() -> torchmetrics.MetricCollection:
    kinds = [torchmetrics.SumMetric, torchmetrics.MeanMetric, torchmetrics.MaxMetric, torchmetrics.CatMetric]
    return torchmetrics.MetricCollection([kind() for kind in kinds])


def make(mirror: Mirror, kind: Any) -> Any:
    with mirror.scope():
        return kind()


def test_merged_over_replicas(mirror: Mirror) -> None:
    aggregators = [
        torchmetrics.MeanMetric,
        torchmetrics.SumMetric,
        torchmetrics.MaxMetric,
        torchmetrics.MinMetric,
        torchmetrics.CatMetric,
    ]
    table: dict[Callable[[], Any], tuple[torch.Tensor, ...]] = {
        BinaryAUROC: (SCORES, LABELS),
        BinaryConfusionMatrix: (SCORES, LABELS),
        MeanSquaredError: (SCORES, LABELS),
        PearsonCorrCoef: (SCORES, LABELS.float()),
        collection_with_shared_states: ((SCORES > 0.5).long(), LABELS),
        **dict.fromkeys(aggregators, (SCORES,)),
    }

    def step(metric: Any, *batch: torch.Tensor) -> None:
        metric.update(*batch)

    for kind, arguments in table.items():
        metric, plain = make(mirror, kind), kind()
        for _ in range(2):
            mirror.run(step, metric, *(split(values) for values in arguments))
            for part in UNEVEN:
                plain.update(*(values[part] for values in arguments))
            computed, expected = metric.compute(), plain.compute()
            if kind is torchmetrics.CatMetric:
                computed, expected = computed.sort().values, expected.sort().values
            with case(kind.__name__):
                torch.testing.assert_close(computed, expected)


def collection_with_shared_states() -> torchmetrics.MetricCollection:
    return torchmetrics.MetricCollection(
        {"micro": MulticlassAccuracy(2, average="micro"), "macro": MulticlassAccuracy(2), "mse": MeanSquaredError()}
    )


@pytest.mark.parametrize("kind", [Everything, collection])
def test_a_new_replica_adds_no_updates_and_those_before_the_first_step_count_once(kind: Any) -> None:
    mirror, other = Mirror(3), Mirror(2)
    metric, second, plain = make(mirror, kind), make(other, kind), kind()
    for counting in (metric, plain):
        counting.update(torch.tensor([1.0, 3.0]))
    mirror.run(lambda: metric.training)
    torch.testing.assert_close(metric.compute(), plain.compute())
    other.run(lambda values: second.update(values), torch.tensor([1.0, 3.0]))
    other.link.replicas[1] = MirrorReplica(1)
    other.driver.reset()
    torch.testing.assert_close(second.compute(), plain.compute())


@pytest.mark.filterwarnings("error")
def test_replicas_without_updates_are_ignored() -> None:
    mirror = Mirror(3)
    metric, plain = make(mirror, Everything), Everything()

    def step(rank: int) -> None:
        if rank == 2:
            metric.update(torch.tensor([1.0, 3.0]))

    mirror.run(step, rank_of(mirror))
    plain.update(torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(metric.compute(), plain.compute())


def test_updates_of_a_replica_with_a_stand_in_batch_are_dropped_and_forward_returns_the_local_value(
    mirror: Mirror,
) -> None:
    metric = make(mirror, torchmetrics.MeanMetric)
    mirror.run(lambda: metric.training)
    held = mirror.replicas[1].hold_metrics()
    assert mirror.run(lambda value: metric(value).item(), PerReplica([1.0, 5.0])) == [1.0, 5.0]
    mirror.replicas[1].restore_metrics(held)
    assert metric.compute().item() == 1.0
    assert [states["_update_count"] for states in mirror.replicas[1].hold_metrics().values()] == [0]


class BothCount:
    """Metrics on replicas, and the same alone."""

    def __init__(self, num_replicas: int) -> None:
        self.mirror, self.ranks = Mirror(num_replicas), range(num_replicas)
        self.metrics, self.alone = make(self.mirror, collection), collection()
        self.numbers = map(float, itertools.count(1))

    def step(self, chosen: int) -> None:
        metrics = self.metrics
        values = [next(self.numbers) for _ in self.ranks]
        counts = [bool(chosen >> rank & 1) for rank in self.ranks]
        parts = PerReplica(values), PerReplica(counts)
        self.mirror.run(lambda value, count: metrics.update(value) if count else None, *parts)
        for value in itertools.compress(values, counts):
            self.alone.update(value)

    def driver(self, _: int) -> None:
        value = next(self.numbers)
        self.metrics.update(value)
        self.alone.update(value)

    def fail(self, chosen: int) -> None:
        """One replica fails; updates of those before it count."""
        metrics, failing = self.metrics, chosen % len(self.ranks)

        def step(rank: int, value: float) -> None:
            if rank == failing:
                raise ZeroDivisionError
            metrics.update(value)

        values = [next(self.numbers) for _ in self.ranks]
        self.mirror.run(lambda: metrics.training)
        with pytest.raises(ZeroDivisionError):
            self.mirror.run(step, rank_of(self.mirror), PerReplica(values))
        self.mirror.driver.reset(chosen // 2 % len(self.ranks))
        for value in values[:failing]:
            self.alone.update(value)

    def reset(self, _: int) -> None:
        self.metrics.reset()
        self.alone.reset()

    def reset_in_step(self, _: int) -> None:
        metrics = self.metrics
        self.mirror.run(lambda: metrics.reset())
        self.alone.reset()

    def compare(self, _: int = 0) -> None:
        metrics = self.metrics
        self.mirror.run(lambda: metrics.training)
        if self.alone["SumMetric"].update_called:
            found, expected = ({**one.compute()} for one in (self.metrics, self.alone))
            for values in (found, expected):
                values["CatMetric"] = torch.atleast_1d(values["CatMetric"]).sort().values
            torch.testing.assert_close(found, expected)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(
        st.tuples(
            st.sampled_from([BothCount.step, BothCount.driver, BothCount.reset, BothCount.reset_in_step])
            | st.sampled_from([BothCount.fail, BothCount.compare]),
            st.integers(0, 7),
        )
    ),
)
def test_any_program_computes_the_metric_of_one_device(
    num_replicas: int, program: list[tuple[Callable[[BothCount, int], None], int]]
) -> None:
    both = BothCount(num_replicas)
    for act, number in program:
        act(both, number)
    both.compare()


def test_rows_are_in_the_order_of_one_device() -> None:
    both = BothCount(3)
    for act in (both.driver, both.step, both.compare, both.step, both.driver, both.step):
        act(7)
    found, expected = (one["CatMetric"].compute().tolist() for one in (both.metrics, both.alone))
    assert found == expected


def test_replicas_keep_their_own_states_if_these_merge_to_the_saved_one() -> None:
    metric: Any = torchmetrics.SumMetric()
    shares = [{"sum_value": torch.tensor(value), "_update_count": 2} for value in (0.1, 0.7, 0.3)]
    restore_states(metric, merge_states(metric, shares))
    metric._raydist_shares = shares
    for rank, share in enumerate(shares):
        assert states_for_rank(metric, divide_states(metric), rank, 3) == share
    first, others = divide_states(metric)
    assert states_for_rank(metric, (first, others), 0, 2) is first  # another number of replicas
    metric.update(1.0)  # it has become another whole
    first, others = divide_states(metric)
    assert [states_for_rank(metric, (first, others), rank, 3) is first for rank in range(3)] == [True, False, False]
