"""Counters of the batches since the last reset: the loss, the rows and the user's metrics.

All counters are metrics created in the strategy's scope: each replica updates its own copy in the step; the driver
reads them merged and resets them. So a step returns nothing, and nothing is fetched before it is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torchmetrics import Metric, MetricCollection

from raydist.core.errors import InvalidArgumentError


@final
class RowCount(Metric):
    """The number of rows seen on all replicas, for the rate."""

    is_differentiable = False
    higher_is_better = None
    full_state_update = False

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, num_rows: int) -> None:
        """Add the rows of one batch of one replica."""
        self.total += num_rows

    def compute(self) -> torch.Tensor:
        """Return the number of rows so far."""
        return self.total.clone()


@final
class LossTotal(Metric):
    """The loss of all batches together: a sum over a denominator, or the sum alone.

    Both are kept in float64 and summed over replicas. The loss is 0 if the denominator is 0.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    total: torch.Tensor
    weight: torch.Tensor

    def __init__(self, *, is_sum: bool = False) -> None:
        super().__init__()
        self._is_sum = is_sum
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, total: torch.Tensor, weight: Any) -> None:
        """Add one replica's part of the sum and the denominator of a batch."""
        self.total += total
        self.weight += weight

    def compute(self) -> torch.Tensor:
        """Return the loss so far, as a float64 scalar."""
        return self.total.clone() if self._is_sum else torch.where(self.weight == 0, 0.0, self.total / self.weight)


@final
@dataclass(frozen=True, slots=True)
class Trackers:
    """The counters of one model.

    Attributes:
        loss: The loss over all rows.
        rows: Number of rows.
        metrics: The user's metrics by their names in logs.
    """

    loss: LossTotal
    rows: RowCount
    metrics: Mapping[str, Metric]

    def update(self, total: torch.Tensor, weight: Any, num_rows: int) -> None:
        """Count one batch of one replica (in the step): its part of the loss's sum and denominator, and its rows."""
        self.loss.update(total, weight)
        self.rows.update(num_rows)

    def reset(self) -> None:
        """Reset all counters (on the driver)."""
        for metric in self._all():
            metric.reset()

    def read(self) -> dict[str, Any]:
        """Return the logs so far (on the driver): floats, and tensors for metrics that are not single numbers.

        Blocks for all dispatched steps.
        """
        logs: dict[str, Any] = {"loss": float(self.loss.compute())}
        logs.update((name, _as_log(metric.compute())) for name, metric in self.metrics.items())
        return logs

    def num_rows(self) -> int:
        """Return the number of rows so far, on all replicas. Blocks for all dispatched steps."""
        return int(self.rows.compute())

    def rows_and_logs(self) -> tuple[int, dict[str, Any]]:
        """Return `num_rows()` and `read()`, for a progress display."""
        return self.num_rows(), self.read()

    def _all(self) -> Iterable[Metric]:
        return (self.loss, self.rows, *self.metrics.values())


def named_metrics(metrics: Any) -> dict[str, Metric]:
    """Return the metrics of `compile` by name: a dict's keys, or class names in snake case, numbered if repeated.

    >>> from torchmetrics.classification import MulticlassAccuracy
    >>> list(named_metrics([MulticlassAccuracy(3), MulticlassAccuracy(3)]))
    ['multiclass_accuracy', 'multiclass_accuracy_1']
    """
    if isinstance(metrics, Mapping | MetricCollection):
        named = dict(metrics.items())
    else:
        named = {}
        for metric in (metrics,) if isinstance(metrics, Metric) else tuple(metrics):
            named[_free_name(_snake_case(type(metric).__name__), named)] = metric
    for name, metric in named.items():
        _require_metric(str(name), metric)
    return named


def _require_metric(name: str, metric: Any) -> None:
    if not isinstance(metric, Metric):
        raise InvalidArgumentError(
            f"metrics must be torchmetrics.Metric objects, got {type(metric).__name__} for {name!r}. "
            "Wrap a function in a torchmetrics.Metric subclass."
        )
    if name == "loss":
        raise InvalidArgumentError(
            f'A metric can not be named "loss", as a {type(metric).__name__} is: logs use this name for the loss '
            "itself. Give it another key."
        )


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    number, free = 0, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _as_log(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.detach().cpu()
    return value
