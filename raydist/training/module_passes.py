"""A pass of a module over one replica's piece of a batch, to the loss and the arguments of metrics.

Under `PipelineStrategy` the pass is that of `ReplicaContext.pipeline_step`: it makes the gradients, too, and each
microbatch is to the loss what a batch of `accumulate_steps` is. The denominator of the global batch is only known after
the last microbatch. So gradients are those of sums, and `Update.divide` divides them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch

from raydist.context.replica_context import NoPeers, ReplicaContext
from raydist.core.values import ReduceOp
from raydist.strategies.functions import get_replica_context
from raydist.strategies.pipeline import PipelineStrategy
from raydist.training.elements import (
    ClassWeights,
    Example,
    Precision,
    autocast,
    forward,
    num_rows_of,
    unpack,
    widened,
)
from raydist.training.global_means import GlobalMeans
from raydist.training.losses import (
    BatchLoss,
    Count,
    is_checked_now,
    label_count,
    loss_of,
    require_mean_over_rows,
    weighted_loss,
)
from raydist.training.model_losses import LossAndOutputs, call_module, model_loss
from raydist.training.settings import CompileSettings, Trainee

if TYPE_CHECKING:
    from torch import nn

    from raydist.context.strategy import Strategy


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one replica for its piece of a batch.

    `compared` holds the arguments for all metrics, or those of each metric by its name.
    """

    loss: BatchLoss
    compared: tuple[Any, Any] | Mapping[str, tuple[Any, ...]]
    num_rows: int


def is_in_stages(strategy: Strategy) -> bool:
    """Return True if modules of the strategy are divided into stages."""
    return isinstance(strategy, PipelineStrategy)


def pass_of(trainee: Trainee, class_weights: ClassWeights) -> Callable[[Any], Outcome]:
    """Return the function from a batch to its loss and the arguments for metrics."""
    module, compiled = trainee.module, trainee.compiled
    if is_in_stages(trainee.strategy):
        return _pass_in_stages(module, compiled, class_weights)
    if compiled.loss is None or compiled.row_loss is None:
        return _pass_with_own_loss(module, compiled)
    joins_batches = compiled.update.accumulation is not None

    def run(batch: Any) -> Outcome:
        context = get_replica_context()
        example = class_weights.weigh(unpack(batch))
        num_rows = _num_rows((example.x, example.y))
        labels = _labels(compiled, example, context)
        prediction = forward(module, example.x, compiled.precision)
        found = _loss(compiled, prediction, example, num_rows, context, labels, joins_batches=joins_batches)
        return Outcome(found, (prediction, example.y), num_rows)

    return run


def _labels(compiled: CompileSettings, example: Example, context: ReplicaContext) -> tuple[Count, Count] | None:
    """Return the local and the global number of counted labels, if the loss divides by it. Blocks for all replicas."""
    is_counted = compiled.loss_kind == "labels" and example.sample_weight is None
    return label_count(compiled.loss, example.y, context) if is_counted else None


def _loss(
    compiled: CompileSettings,
    prediction: Any,
    example: Example,
    num_rows: int,
    context: ReplicaContext,
    labels: tuple[Count, Count] | None,
    *,
    joins_batches: bool,
) -> BatchLoss:
    """Return the loss of a batch by the loss function of `compile`."""
    loss: Any = compiled.loss
    row_loss: Any = compiled.row_loss
    kind = compiled.loss_kind
    if example.sample_weight is not None:
        return weighted_loss(row_loss(prediction, example.y), example.sample_weight, context)
    call = partial(loss, prediction, example.y)
    check, is_shared = None, joins_batches or context.num_replicas_in_sync > 1
    if kind == "unknown" and is_shared and context.num_rows and is_checked_now(loss):
        check = partial(require_mean_over_rows, loss, prediction, example.y, num_rows)
    return loss_of(call, kind, num_rows, context, labels=labels, joins_batches=joins_batches, check=check)


def _pass_with_own_loss(module: nn.Module, compiled: CompileSettings) -> Callable[[Any], Outcome]:
    precision, kind, has_metrics = compiled.precision, compiled.loss_kind, bool(compiled.trackers.metrics)
    joins_batches = compiled.update.accumulation is not None

    def run(batch: Any) -> Outcome:
        context = get_replica_context()
        num_rows = _num_rows(batch)
        with autocast(batch, precision), GlobalMeans(context) if kind == "unknown" else nullcontext() as means:
            found = LossAndOutputs.of(call_module(module, batch), module)
        loss = model_loss(found.loss, kind, means, num_rows, context, joins_batches=joins_batches)
        compared: Any = found.metric_arguments() if has_metrics else ((), ())
        if compared is None:
            compared = widened(found.logits(module)), found.labels(batch)
        return Outcome(loss, compared, num_rows)

    return run


def _pass_in_stages(module: nn.Module, compiled: CompileSettings, class_weights: ClassWeights) -> Callable[..., Any]:
    has_metrics, precision = bool(compiled.trackers.metrics), compiled.precision

    def run(batch: Any) -> Outcome:
        context = get_replica_context()
        example = class_weights.weigh(unpack(batch))

        def loss_of_microbatch(output: Any, targets: Any) -> Any:
            part = Example(None, *targets)
            num_rows = num_rows_of(part.y)
            alone = _alone(context, num_rows)
            with torch.autocast(context.device.type, enabled=False):
                prediction = output if precision is None else widened(output)
                labels = _labels(compiled, part, alone)
                found = _loss(compiled, prediction, part, num_rows, alone, labels, joins_batches=True)
            factor = 1 if found.denominator is None else torch.as_tensor(found.denominator).to(found.objective)
            counts = (found.total.double().reshape(1), torch.as_tensor(found.weight, dtype=torch.float64).reshape(1))
            return found.objective * factor, (*counts, lists_as_tuples(prediction) if has_metrics else ())

        targets = (example.y, example.sample_weight)
        found = _run_stages(module, example.x, targets, loss_of_microbatch, precision)
        total, weight, prediction = found[0].sum(), found[1].sum(), found[2]
        denominator = None if compiled.loss_kind == "sum" else context.all_reduce(ReduceOp.SUM, weight)
        num_rows = _num_rows((example.x, example.y))
        return Outcome(BatchLoss(total, denominator, total, weight), (prediction, example.y), num_rows)

    return run


def _alone(context: ReplicaContext, num_rows: int) -> ReplicaContext:
    """Return the context of a replica without others."""
    peers = NoPeers(context.device)
    peers.rows = (num_rows,)
    return ReplicaContext(context.strategy, peers)


def predict_in_stages(module: nn.Module, x: Any, precision: Precision) -> Any:
    """Return the module's outputs for `x`. Blocks until all stages are done."""

    def outputs(output: Any, _: Any) -> Any:
        return torch.zeros(()), lists_as_tuples(output if precision is None else widened(output))

    return _run_stages(module, x, None, outputs, precision)


def _run_stages(module: nn.Module, x: Any, targets: Any, loss_fn: Callable[..., Any], precision: Precision) -> Any:
    """Run a step of a pipeline; return what `loss_fn` returns beside the loss."""
    inputs = x if type(x) is tuple else (x,)  # pipelines take a dict as keyword arguments
    with autocast(x, precision):
        _, found = get_replica_context()._peers.pipelines.step((inputs, targets), loss_fn, module, adds_up=True)
    return found


def _num_rows(batch: Any) -> int:
    return get_replica_context().num_rows or num_rows_of(batch)


def lists_as_tuples(value: Any) -> Any:
    """Convert a list of outputs, which many modules return, to a tuple: a list would be one leaf of a nest."""
    return tuple(value) if isinstance(value, list) else value
