"""What replicas have gathered from their own rows outlives a step that fails, neither lost nor doubled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn

import raydist as rd

pytestmark = pytest.mark.ray


@pytest.mark.parametrize("failing", [0, 1])
def test_statistics_and_metrics_after_a_failed_step(two: rd.MirroredStrategy, failing: int) -> None:
    with two.scope():
        norm = nn.BatchNorm1d(1, momentum=0.5, affine=False)
        metrics: Any = torchmetrics.MetricCollection(
            [torchmetrics.SumMetric(), torchmetrics.MeanMetric(), torchmetrics.MaxMetric(), torchmetrics.CatMetric()]
        )

    def step(batch: torch.Tensor, fails: bool) -> torch.Tensor:
        if fails and rd.get_replica_context().replica_id_in_sync_group == failing:
            raise ZeroDivisionError("on purpose")
        if not fails:
            norm(batch)
            metrics.update(batch.flatten())
        return batch.sum()

    def seen() -> tuple[float, dict[str, Any]]:
        assert norm.running_mean is not None
        found = {name: value.sort().values.tolist() for name, value in metrics.compute().items()}
        return norm.running_mean.item(), found

    rows = np.arange(4.0, dtype=np.float32).reshape(4, 1)
    (batch,) = two.distribute_dataset(rd.Dataset.from_tensor_slices(rows).batch(4))
    two.run(step, args=(batch, False))
    expected: dict[str, Any] = {
        "SumMetric": 6.0,
        "MeanMetric": 1.5,
        "MaxMetric": 3.0,
        "CatMetric": [0.0, 1.0, 2.0, 3.0],
    }
    assert seen() == (0.75, expected)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            two.local_results(two.run(step, args=(batch, True)))
        assert seen() == (0.75, expected)
    two.run(step, args=(batch, False))
    twice = {"SumMetric": 12.0, "MeanMetric": 1.5, "MaxMetric": 3.0, "CatMetric": sorted(expected["CatMetric"] * 2)}
    assert seen() == (0.75 / 2 + 0.75, twice)


def test_rows_that_a_replica_stood_in_for_are_not_counted_by_a_failed_step(two: rd.MirroredStrategy) -> None:
    with two.scope():
        total = torchmetrics.SumMetric()
        norm = nn.BatchNorm1d(1, momentum=0.5, affine=False)

    def step(batch: torch.Tensor, fails: bool) -> torch.Tensor:
        if fails and rd.get_replica_context().num_rows:
            raise ZeroDivisionError("on purpose")
        total.update(batch)
        norm(batch)
        return batch.sum()

    whole, rest = two.distribute_dataset(
        rd.Dataset.from_tensor_slices(np.arange(5.0, dtype=np.float32).reshape(5, 1)).batch(4)
    )
    two.run(step, args=(whole, False))
    assert norm.running_mean is not None
    assert (total.compute().item(), norm.running_mean.item()) == (6.0, 0.75)
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        two.local_results(two.run(step, args=(rest, True)))
    assert (total.compute().item(), norm.running_mean.item()) == (6.0, 0.75)
