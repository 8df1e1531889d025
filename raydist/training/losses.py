"""From a user's loss on local rows to what one replica optimises and reports.

The objective of a step is the mean over the rows of the *global* batch, or with sample weights the weighted mean
sum(w * loss) / sum(w) over them, whatever rows each replica holds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import nn

from raydist.errors import InvalidArgumentError, SpecError
from raydist.training.optimizers import class_by_name

__all__ = ["LocalLoss", "adds_rows_up", "loss_by_name", "mean_loss", "sum_loss", "weighted_loss"]


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


def sum_loss(loss: Any, num_rows: int, num_rows_everywhere: int) -> LocalLoss:
    """For a loss that is the sum over local rows: what makes the mean over replicas, by rows, that of all rows.

    >>> pieces = [sum_loss(torch.tensor(6.0), 3, 4), sum_loss(torch.tensor(1.0), 1, 4)]
    >>> sum(piece.mean.item() * piece.weight / 4 for piece in pieces)
    7.0
    """
    return LocalLoss(_as_tensor(loss).sum() * (num_rows_everywhere / num_rows), num_rows)


def adds_rows_up(loss: Any) -> bool:
    """Whether a loss says of itself that it is the sum over rows: a module of torch's, a partial of a function."""
    keywords = loss.keywords if isinstance(loss, partial) else {}
    said = keywords.get("reduction", getattr(loss, "reduction", None))
    return isinstance(said, str) and said == "sum"


def loss_by_name(name: str) -> tuple[nn.Module, nn.Module]:
    """The loss module of torch's that a name means ("mse", "MSELoss", "cross_entropy"), and its form for single rows.

    Raises:
        InvalidArgumentError: There is none; shows those that there are.
    """
    losses = {kind.__name__: kind for kind in _public_modules() if _is_loss(kind)}
    found = class_by_name(name, losses, "loss", suffix="Loss")
    return found(), found(reduction="none")


def _public_modules() -> list[type[nn.Module]]:
    found = vars(nn.modules.loss).values()
    kinds = [kind for kind in found if isinstance(kind, type) and issubclass(kind, nn.Module)]
    return [kind for kind in kinds if getattr(nn, kind.__name__, None) is kind]


def _is_loss(kind: type[nn.Module]) -> bool:
    """Whether it is a class of losses of (prediction, target) that needs no arguments."""
    compares = list(inspect.signature(kind.forward).parameters)[1:] in (["input", "target"], ["log_input", "target"])
    free = all(p.default is not p.empty for p in inspect.signature(kind).parameters.values())
    return compares and free and kind is not nn.NLLLoss2d  # torch's own name of old for NLLLoss


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
