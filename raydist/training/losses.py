"""From a user's loss on local rows to what one replica optimises and reports.

The objective of a step is the mean over the rows of the *global* batch, or with sample weights the weighted mean
sum(w * loss) / sum(w) over them, whatever rows each replica holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch

from raydist.errors import InvalidArgumentError, SpecError

__all__ = ["LocalLoss", "mean_loss", "weighted_loss"]


@final
@dataclass(frozen=True, slots=True)
class LocalLoss:
    """The loss of one replica's rows.

    Attributes:
        mean: Its mean over the local rows, a scalar with gradients.
        weight: What this mean weighs among the replicas: the number of rows, or the sum of their sample weights.
    """

    mean: torch.Tensor
    weight: torch.Tensor | int

    def objective(self, sum_over_replicas: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """This replica's summand of the global weighted mean: the objective is the SUM of them over replicas.

        Args:
            sum_over_replicas: All-reduce of a scalar tensor. A weight of zero on all replicas gives an objective of 0.
        """
        weight = torch.as_tensor(self.weight, dtype=self.mean.dtype, device=self.mean.device)
        everywhere = sum_over_replicas(weight)
        return self.mean * (weight / torch.where(everywhere == 0, 1.0, everywhere))


def mean_loss(loss: Any, num_rows: int) -> LocalLoss:
    """For batches without weights. `loss` is a scalar (the mean over local rows) or has one loss per row, (n, ...)."""
    value = _as_tensor(loss)
    if value.ndim:
        _require_per_row(value, num_rows)
    return LocalLoss(value.mean(), num_rows)


def weighted_loss(loss: Any, sample_weight: torch.Tensor) -> LocalLoss:
    """For batches with weights, (n,) or (n, 1). `loss` has one value per row, (n, ...); further axes are averaged."""
    value = _as_tensor(loss)
    if not value.ndim:
        raise InvalidArgumentError(
            f"With sample weights the loss must give one value per row, got a scalar of shape {tuple(value.shape)}. "
            'Use reduction="none", for example torch.nn.CrossEntropyLoss(reduction="none").'
        )
    num_rows = sample_weight.shape[0]
    _require_per_row(value, num_rows)
    if sample_weight.numel() != num_rows:
        raise SpecError(
            f"sample_weight must hold one number per row, got shape {tuple(sample_weight.shape)}. Average it over "
            "other axes."
        )
    weights = sample_weight.reshape(num_rows).to(value)
    total = weights.sum()
    per_row = value.reshape(num_rows, -1).mean(dim=1)
    return LocalLoss((per_row * weights).sum() / torch.where(total == 0, 1.0, total), total)


def _as_tensor(loss: Any) -> torch.Tensor:
    if isinstance(loss, torch.Tensor):
        return loss
    raise SpecError(
        f"The loss must return a tensor (the mean over its rows, or one loss per row), got {type(loss).__name__}."
    )


def _require_per_row(value: torch.Tensor, num_rows: int) -> None:
    if value.shape[0] != num_rows:
        raise SpecError(
            f"The loss must be a scalar or have one value per row, got shape {tuple(value.shape)} for {num_rows} rows."
        )
