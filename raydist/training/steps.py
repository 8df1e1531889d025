"""The step functions: what one replica does with its piece of one batch.

Each is an ordinary closure over the module, the optimizer and the trackers, as a user would write it for
`strategy.run`. A replica without rows runs them on stand-in rows: the strategy zeroes its gradients and gives its
metrics back the states that they had before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from raydist.errors import SpecError
from raydist.nest import leaves_in, map_structure
from raydist.strategies.default import get_replica_context
from raydist.training.class_weights import ClassWeights
from raydist.training.counted_losses import count_in, divides_by_count, total_of
from raydist.training.elements import Example, inputs_of, unpack
from raydist.training.losses import LocalLoss, adds_rows_up, mean_loss, sum_loss, weighted_loss
from raydist.training.precision import Precision, forward
from raydist.training.trackers import Trackers
from raydist.training.updates import Update
from raydist.training.value_guesses import guessing, update_alike
from raydist.values import ReduceOp

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from raydist.context.strategy import Strategy

__all__ = ["Compiled", "Step", "Trainee", "evaluation_step", "looped", "prediction_step", "training_step"]

Step = Callable[[Any], Any]

_END = object()


@final
@dataclass(frozen=True, slots=True)
class Compiled:
    """What `Model.compile` was given, and the counters made for it.

    Attributes:
        update: The optimizer, and what goes with its steps.
        loss: What is to become small.
        row_loss: The same for batches whose rows have weights: one value per row.
        trackers: The counters.
        steps_per_execution: Steps of one call to the replicas.
        precision: In which the module's forward computes; None for that of its parameters.
        scheduler_here: Follows the batches on the driver, where workers take them apart from each other: none of these
            sees all steps of the optimizer. `update` has none then.
    """

    update: Update
    loss: Callable[[Any, Any], torch.Tensor]
    row_loss: Callable[[Any, Any], torch.Tensor]
    trackers: Trackers
    steps_per_execution: int
    precision: Precision = None
    scheduler_here: LRScheduler | None = None


@final
@dataclass(frozen=True, slots=True)
class Trainee:
    """What fit and evaluate work on: a compiled module and the strategy in whose scope it was made."""

    strategy: Strategy
    module: nn.Module
    compiled: Compiled


def training_step(module: nn.Module, compiled: Compiled, class_weights: ClassWeights, count: Callable[[], Any]) -> Step:
    """Forward, backward and update on one batch; then `count()`."""
    update = compiled.update
    loss_fn, track = _loss_function(compiled), _tracking(compiled.trackers)

    def train_step(batch: Any) -> None:
        example = class_weights.weigh(unpack(batch))
        update.begin()
        divisor = _divisor(compiled.loss, example)
        prediction = forward(module, example.x, compiled.precision)
        loss = loss_fn(prediction, example, divisor)
        update.backward(*_global_objective(loss, example))
        update.end()
        track(loss, prediction, example)
        count()

    return train_step


def evaluation_step(module: nn.Module, compiled: Compiled) -> Step:
    """Loss and metrics of one batch."""
    loss_fn, track = _loss_function(compiled), _tracking(compiled.trackers)

    def test_step(batch: Any) -> None:
        example = unpack(batch)
        with torch.no_grad():
            divisor = _divisor(compiled.loss, example)
            prediction = forward(module, example.x, compiled.precision)
            loss = loss_fn(prediction, example, divisor)
            track(loss, prediction, example)

    return test_step


def prediction_step(module: nn.Module, precision: Precision = None) -> Step:
    """The module's outputs for one batch, one entry per row, on the CPU."""

    def predict_step(batch: Any) -> Any:
        with torch.no_grad():
            inputs = inputs_of(batch)
            prediction = _lists_as_tuples(forward(module, inputs, precision))
        num_rows = len(leaves_in(inputs)[0])
        return map_structure(lambda leaf: _output(leaf, num_rows), prediction)

    return predict_step


def looped(step: Step) -> Callable[[Iterator[Any], int], int]:
    """Up to `count` steps in one call, drawing batches from a distributed iterator inside the replica.

    Returns the number of steps done: less than `count` at the end of the data only.
    """

    def loop(iterator: Iterator[Any], count: int) -> int:
        for done in range(count):
            batch = next(iterator, _END)
            if batch is _END:
                return done
            step(batch)
        return count

    return loop


def _divisor(loss: Any, example: Example) -> torch.Tensor | None:
    """What the sum over all replicas' rows is divided by, where that is not their number; None where it is.

    Asked before the forward pass: replicas that have just got their batches wait least for each other.
    """
    context = get_replica_context()
    if context.num_replicas_in_sync == 1 or example.sample_weight is not None or not divides_by_count(loss, example.y):
        return None
    everywhere: torch.Tensor = context.all_reduce(ReduceOp.SUM, count_in(loss, example.y))
    return everywhere


def _loss_function(compiled: Compiled) -> Callable[[Any, Example, torch.Tensor | None], LocalLoss]:
    loss, row_loss, is_sum = compiled.loss, compiled.row_loss, adds_rows_up(compiled.loss)

    def local_loss(prediction: Any, example: Example, divisor: torch.Tensor | None) -> LocalLoss:
        if example.sample_weight is not None:
            return weighted_loss(row_loss(prediction, example.y), example.sample_weight)
        num_rows = _num_rows(example)
        everywhere = get_replica_context().global_num_rows or num_rows
        if is_sum:
            return sum_loss(loss(prediction, example.y), num_rows, everywhere)
        if divisor is not None and isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
            return sum_loss(total_of(loss, prediction, example.y) / divisor, num_rows, everywhere)
        return mean_loss(loss(prediction, example.y), num_rows)

    return local_loss


def _global_objective(loss: LocalLoss, example: Example) -> tuple[torch.Tensor, Any]:
    """This replica's share of what the step makes small, and what the global batch weighs."""
    context = get_replica_context()
    if example.sample_weight is None:
        return loss.mean, context.global_num_rows or _num_rows(example)
    weight = torch.as_tensor(loss.weight)
    everywhere: torch.Tensor = context.all_reduce(ReduceOp.SUM, weight * 0 if context.num_rows == 0 else weight)
    return loss.objective(lambda _: everywhere), everywhere


def _tracking(trackers: Trackers) -> Callable[[LocalLoss, Any, Example], None]:
    metrics, guesses = trackers.metrics, guessing(trackers.metrics)

    def track(loss: LocalLoss, prediction: Any, example: Example) -> None:
        trackers.update(loss.mean.detach(), loss.weight, _num_rows(example))
        detached = map_structure(lambda leaf: leaf.detach(), _lists_as_tuples(prediction))
        update_alike(metrics, guesses, (detached, example.y), get_replica_context())

    return track


def _output(leaf: Any, num_rows: int) -> torch.Tensor:
    if not isinstance(leaf, torch.Tensor) or leaf.shape[:1] != (num_rows,):
        got = f"shape {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
        raise SpecError(f"predict needs tensors with one entry per input row ({num_rows}) from the module, got {got}.")
    return leaf.cpu()


def _num_rows(example: Example) -> int:
    return len(leaves_in((example.x, example.y))[0])


def _lists_as_tuples(value: Any) -> Any:
    """Many modules return a list of outputs; in a nest a list would be one leaf."""
    return tuple(value) if isinstance(value, list) else value
