"""From gradients to parameters: what follows a backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from raydist.errors import InvalidArgumentError

__all__ = ["Accumulation", "Update", "scheduler_of"]


@final
class Accumulation(nn.Module):
    """What of a group of batches is in the gradients. Its buffers are mirrored: it outlasts a call to the replicas.

    Args:
        size: Batches of a group.
        scaled: Keep what gradients are multiplied by near 1, as float16 needs it: the unit of weights is that of the
            group's first batch.

    >>> group = Accumulation(2)
    >>> group.add(8)
    tensor(8., dtype=torch.float64)
    >>> group.is_empty, group.is_full
    (False, False)
    """

    batches: torch.Tensor
    weight: torch.Tensor
    unit: torch.Tensor | None

    def __init__(self, size: int, *, scaled: bool = False) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("weight", torch.zeros((), dtype=torch.float64))
        self.register_buffer("unit", torch.ones((), dtype=torch.float64) if scaled else None)

    @property
    def is_empty(self) -> bool:
        """Whether the gradients hold nothing yet."""
        return not self.batches

    @property
    def is_full(self) -> bool:
        """Whether the group is complete."""
        return int(self.batches) >= self.size

    def add(self, weight: Any) -> torch.Tensor:
        """Count another global batch. Its gradients belong to the group times the number that this returns."""
        if self.unit is not None and self.is_empty:
            self.unit.copy_(weight if weight > 0 else torch.ones(()))
        factor = torch.as_tensor(weight, dtype=torch.float64) / (1.0 if self.unit is None else self.unit)
        self.batches += 1
        self.weight += factor
        return factor

    def take_mean(self, parameters: list[torch.Tensor]) -> None:
        """Make the gradients the mean over the group, and begin the next one."""
        total = float(self.weight)
        for parameter in parameters:
            if parameter.grad is not None and total:
                parameter.grad.div_(total)
        self.batches.zero_()
        self.weight.zero_()


@final
@dataclass(frozen=True, slots=True)
class Update:
    """How a step changes the parameters.

    Attributes:
        optimizer: It.
        scheduler: Follows each step of the optimizer.
        clip_norm: Most that the norm of all gradients together may be.
        accumulation: Where several batches make one step: that of their rows, as if they had been one batch.
        scaler: Scales the loss up where gradients are computed in float16.
    """

    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None = None
    clip_norm: float | None = None
    accumulation: Accumulation | None = None
    scaler: torch.amp.GradScaler | None = None

    def begin(self) -> None:
        """Before the forward of a batch."""
        if self.accumulation is None or self.accumulation.is_empty:
            self.optimizer.zero_grad()

    def backward(self, objective: torch.Tensor, denominator: Any) -> None:
        """Add the gradients of a batch, which are global afterwards.

        Args:
            objective: Its gradients, summed over the replicas, are those of the global batch's loss.
            denominator: What that loss is divided by, as rows. None for a sum.
        """
        if self.accumulation is not None:
            factor = self.accumulation.add(0 if denominator is None else denominator)
            objective = objective if denominator is None else objective * factor.to(objective)
        (objective if self.scaler is None else self.scaler.scale(objective)).backward()

    def end(self) -> None:
        """After the backward of a batch: change the parameters, unless the group has more batches to come."""
        if self.accumulation is None or self.accumulation.is_full:
            self._apply()

    def finish(self) -> None:
        """After the last batch of a pass: change the parameters by what a group has that did not become complete."""
        if self.accumulation is not None and not self.accumulation.is_empty:
            self._apply()

    def _apply(self) -> None:
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if self.accumulation is not None:
            self.accumulation.take_mean(parameters)
        if self.clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()


def scheduler_of(
    given: LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | None, optimizer: torch.optim.Optimizer
) -> LRScheduler | None:
    """The scheduler that `compile` was given, or that the function makes which it was given.

    Raises:
        InvalidArgumentError: It is none, waits for a metric, or is of another optimizer.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> scheduler_of(lambda it: torch.optim.lr_scheduler.StepLR(it, 1), optimizer).get_last_lr()
    [0.1]
    """
    if given is None:
        return None
    made: Any = given if isinstance(given, LRScheduler) or not callable(given) else given(optimizer)
    if isinstance(made, ReduceLROnPlateau):
        raise InvalidArgumentError(
            "scheduler must be one that steps with the optimizer, got ReduceLROnPlateau, which waits for a metric. "
            "Call its step(logs[...]) in the on_epoch_end of a callback."
        )
    if not isinstance(made, LRScheduler):
        raise InvalidArgumentError(
            f"scheduler must be a torch.optim.lr_scheduler.LRScheduler, or a function that makes one of the optimizer, "
            f"got {made!r}."
        )
    if made.optimizer is not optimizer:
        raise InvalidArgumentError(
            f"The scheduler must be of the optimizer that is compiled with it, got one of another "
            f"{type(made.optimizer).__name__}. Give compile a function: scheduler=lambda it: StepLR(it, 10)."
        )
    return made
