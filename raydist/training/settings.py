"""The settings of `Model.compile`, and the part of a model that training and evaluation use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from raydist.training.elements import Precision
from raydist.training.losses import LossKind
from raydist.training.trackers import Trackers
from raydist.training.updates import Update

if TYPE_CHECKING:
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler

    from raydist.context.strategy import Strategy


@final
@dataclass(frozen=True, slots=True)
class CompileSettings:
    """The arguments of `Model.compile`, and the counters created for them.

    Attributes:
        update: The optimizer, scheduler and accumulation.
        loss: The loss function; None if the module computes its loss.
        row_loss: The loss function for batches with row weights: one value per row.
        loss_kind: Denominator of the loss.
        trackers: The counters.
        steps_per_execution: Steps of one call to the replicas.
        precision: Precision of the module's forward pass; None for that of its parameters.
        scheduler_here: Scheduler that counts batches on the driver, if workers train independently and none sees all
            steps of the optimizer. `update` then has no scheduler.
    """

    update: Update
    loss: Callable[[Any, Any], Any] | None
    row_loss: Callable[[Any, Any], Any] | None
    loss_kind: LossKind
    trackers: Trackers
    steps_per_execution: int
    precision: Precision = None
    scheduler_here: LRScheduler | None = None


@final
@dataclass(frozen=True, slots=True)
class Trainee:
    """The part of a compiled `Model` that fit and evaluate use: strategy, module, and settings of `compile`."""

    strategy: Strategy
    module: nn.Module
    compiled: CompileSettings
