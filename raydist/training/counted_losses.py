"""Losses of torch's that divide by something else than rows: by tokens that count, by weights of classes.

Means of replicas do not add up there, sums over one denominator do: each replica adds up its rows, and the replicas
tell each other what they would have divided by.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["count_in", "divides_by_count", "total_of"]


def divides_by_count(loss: Any, target: Any) -> TypeGuard[nn.CrossEntropyLoss | nn.NLLLoss]:
    """Whether `loss` is a mean over less than all rows, or over rows that weigh differently, or may be.

    Labels say that only when they are there: each class but one counts, and by default that is -100.

    >>> divides_by_count(nn.CrossEntropyLoss(), torch.tensor([1, -100]))
    True
    """
    if type(loss) not in (nn.CrossEntropyLoss, nn.NLLLoss) or loss.reduction != "mean":
        return False
    return isinstance(target, torch.Tensor) and not target.is_floating_point()


def count_in(loss: nn.CrossEntropyLoss | nn.NLLLoss, target: torch.Tensor) -> torch.Tensor:
    """What `loss` divides by, for these labels.

    >>> count_in(nn.CrossEntropyLoss(), torch.tensor([[1, -100, 0]]))
    tensor(2)
    """
    counts = target != loss.ignore_index
    if loss.weight is not None:
        counts = loss.weight[torch.where(counts, target, 0)] * counts
    return counts.sum()


def total_of(loss: nn.CrossEntropyLoss | nn.NLLLoss, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """What `loss` divides, for these rows.

    >>> total_of(nn.CrossEntropyLoss(), torch.zeros(1, 2, 3), torch.tensor([[1, -100, 0]])) / 2
    tensor(0.6931)
    """
    settings: dict[str, Any] = {"weight": loss.weight, "ignore_index": loss.ignore_index, "reduction": "sum"}
    if isinstance(loss, nn.CrossEntropyLoss):
        return F.cross_entropy(prediction, target, label_smoothing=loss.label_smoothing, **settings)
    return F.nll_loss(prediction, target, **settings)
