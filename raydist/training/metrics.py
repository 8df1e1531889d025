"""A weighted mean that stays exact over millions of steps, as a torchmetrics metric.

Any torchmetrics metric works in a scope. This module imports torch and torchmetrics, so it is imported at its first use
only.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torchmetrics import Metric


@final
class Mean(Metric):
    """Weighted mean of all values (tf.keras.metrics.Mean): sum(weight * value) / sum(weight).

    Sums are float64 (torchmetrics.MeanMetric keeps float32, which loses digits of a loss over a long epoch) and added
    over replicas, so that uneven batches count by weight. With a total weight of 0 the mean is 0, as in Keras.

    Args:
        settings: Arguments of `torchmetrics.Metric`.

    Attributes:
        total: Sum of weight * value so far: a float64 scalar.
        weight: Sum of the weights so far: a float64 scalar.

    >>> mean = Mean()
    >>> mean.update(1.0, weight=3)  # a mean over 3 rows
    >>> mean.update([2.0, 2.0])     # two values
    >>> mean.compute()
    tensor(1.4000, dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False

    total: torch.Tensor
    weight: torch.Tensor

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, value: Any, weight: Any = 1.0) -> None:
        """Add values. Does not communicate with other replicas.

        Args:
            value: A number, or a tensor of values of any shape.
            weight: A number or a tensor that broadcasts to the shape of `value`.

        >>> mean = rd.Mean()
        >>> mean.update([1.0, 5.0], weight=[3.0, 1.0])
        >>> float(mean.compute())
        2.0
        """
        device = self.total.device
        values = torch.as_tensor(value, dtype=torch.float64, device=device).detach()
        weights = torch.as_tensor(weight, dtype=torch.float64, device=device).detach().expand(values.shape)
        self.total += (values * weights).sum()
        self.weight += weights.sum()

    def compute(self) -> torch.Tensor:
        """Return the mean so far: a float64 scalar, 0 if all weights are 0.

        >>> mean = rd.Mean()
        >>> mean.update(2.0)
        >>> float(mean.compute())
        2.0
        """
        return torch.where(self.weight == 0, 0.0, self.total / self.weight)
