"""The step functions: the work of one replica on its piece of one batch.

Each is an ordinary closure over the module, the optimizer and the trackers, as a user would write it for
`strategy.run`. A replica without rows runs the step on padding rows: the strategy then zeroes the replica's gradients
and restores its metrics' states from before the step.

In training, replicas add gradients up (`RunOptions(gradient_reduce_op=SUM)` in `fit.py`) instead of weighting them by
rows: each replica's loss is divided by the denominator of the global batch already (`losses.py`).

torchmetrics' classification metrics interpret predictions within [0, 1] as probabilities and all others as logits,
batch by batch. A replica's piece may look like probabilities although the whole batch does not. So the replicas
compare their pieces; if these differ, one replica updates such metrics with the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torchmetrics import Metric

from raydist.context.replica_context import ReplicaContext
from raydist.core.errors import SpecError
from raydist.core.nest import leaves_in, map_structure
from raydist.core.values import ReduceOp
from raydist.strategies.functions import get_replica_context
from raydist.training.elements import ClassWeights, Precision, autocast, forward, inputs_of, num_rows_of, widened
from raydist.training.model_losses import call_module, without_loss
from raydist.training.module_passes import Outcome, is_in_stages, lists_as_tuples, pass_of, predict_in_stages
from raydist.training.settings import Trainee
from raydist.training.trackers import Trackers

if TYPE_CHECKING:
    pass

# These metrics take the largest score, logit or probability alike.
_NEVER_GUESS = {"MulticlassStatScores", "MulticlassConfusionMatrix", "MulticlassExactMatch"}


def guessing(metrics: Mapping[str, Metric]) -> dict[str, bool]:
    """Return the names of metrics that guess; True for those that look at a part of the predictions only.

    >>> from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy
    >>> guessing({"auroc": BinaryAUROC(ignore_index=-1), "accuracy": MulticlassAccuracy(3)})
    {'auroc': True}
    """
    return {name: _ignores(metric) for name, metric in metrics.items() if any(map(_guesses, metric.modules()))}


def _guesses(part: torch.nn.Module) -> bool:
    bases = type(part).__mro__
    if any(base.__name__ in _NEVER_GUESS for base in bases):
        return False
    return any(base.__module__.startswith("torchmetrics.classification.") for base in bases)


def _ignores(metric: Metric) -> bool:
    return any(getattr(part, "ignore_index", None) is not None for part in metric.modules())


def update_alike(
    metrics: Mapping[str, Metric], guesses: Mapping[str, bool], batch: tuple[Any, ...], context: ReplicaContext
) -> None:
    """Update metrics with one replica's (prediction, target, ...), so that the merged state is the whole batch's.

    `guesses` is the result of `guessing` for the metrics.
    """
    alike = not guesses or context.num_replicas_in_sync == 1 or _look_alike(batch[0], any(guesses.values()), context)
    for name, metric in metrics.items():
        if alike or name not in guesses:
            metric.update(*batch)
    if alike:
        return
    whole = context.all_gather(batch, 0)
    if _is_first_with_rows(context):
        for name in guesses:
            metrics[name].update(*whole)


def _look_alike(prediction: Any, in_part: bool, context: ReplicaContext) -> bool:
    """Return True if all replicas' predictions lead a metric to the same guess. Blocks for all replicas."""
    leaves = [leaf for leaf in leaves_in(prediction) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    if not leaves:
        return True
    within = torch.stack([((leaf >= 0) & (leaf <= 1)).all() for leaf in leaves])
    found = context.all_reduce(ReduceOp.MAX, torch.stack([within, ~within]).to(torch.int32))
    some_within, some_beyond = found.bool()
    # A metric that ignores rows may see only probabilities in a piece that has logits as well.
    return not bool((some_beyond if in_part else some_within & some_beyond).any())


def _is_first_with_rows(context: ReplicaContext) -> bool:
    rank = context.replica_id_in_sync_group
    return bool(rank == context.all_reduce(ReduceOp.MIN, rank))


Step = Callable[[Any], Any]

_END = object()


def training_step(trainee: Trainee, class_weights: ClassWeights, count: Callable[[], Any]) -> Step:
    """Return the step function for training: forward, backward and update on one batch; then `count()`."""
    compiled, in_stages = trainee.compiled, is_in_stages(trainee.strategy)
    update = compiled.update
    run, track = pass_of(trainee, class_weights), _tracking(compiled.trackers)

    def train_step(batch: Any) -> None:
        update.begin()
        outcome = run(batch)
        if in_stages:  # the pass has made gradients
            update.divide(outcome.loss.denominator)
        else:
            update.backward(outcome.loss.objective, outcome.loss.denominator)
        update.end()
        track(outcome)
        count()

    return train_step


def evaluation_step(trainee: Trainee) -> Step:
    """Return the step function for the loss and metrics of one batch."""
    run, track = pass_of(trainee, ClassWeights()), _tracking(trainee.compiled.trackers)

    def test_step(batch: Any) -> None:
        with torch.no_grad():
            track(run(batch))

    return test_step


def prediction_step(
    module: nn.Module, precision: Precision = None, *, by_keyword: bool = False, in_stages: bool = False
) -> Step:
    """Return the step function for the module's outputs for one batch, one entry per row, on the CPU.

    With `by_keyword` the module computes its own loss: a dict holds keyword arguments, and the loss is no output.
    """

    def predict_step(batch: Any) -> Any:
        inputs = batch if by_keyword else inputs_of(batch)
        with torch.no_grad():
            if by_keyword:
                with autocast(inputs, precision):
                    outputs = without_loss(call_module(module, inputs), num_rows_of(inputs))
                prediction = outputs if precision is None else widened(outputs)
            elif in_stages:
                prediction = predict_in_stages(module, inputs, precision)
            else:
                prediction = lists_as_tuples(forward(module, inputs, precision))
        return _outputs(prediction, num_rows_of(inputs))

    return predict_step


def looped(step: Step) -> Callable[[Iterator[Any], int], int]:
    """Return a function that runs up to `count` steps, drawing batches from a distributed iterator in the replica.

    The function returns the number of steps done: less than `count` only at the end of the data.
    """

    def loop(iterator: Iterator[Any], count: int) -> int:
        for done in range(count):
            batch = next(iterator, _END)
            if batch is _END:
                return done
            step(batch)
        return count

    return loop


def _tracking(trackers: Trackers) -> Callable[[Outcome], None]:
    metrics, guesses = trackers.metrics, guessing(trackers.metrics)

    def track(outcome: Outcome) -> None:
        trackers.update(outcome.loss.total, outcome.loss.weight, outcome.num_rows)
        if not metrics:
            return
        context = get_replica_context()
        if isinstance(outcome.compared, Mapping):
            for name, arguments in outcome.compared.items():
                own = {name: guesses[name]} if name in guesses else {}
                update_alike({name: metrics[name]}, own, map_structure(_detached, arguments), context)
            return
        prediction, target = outcome.compared
        detached = map_structure(_detached, lists_as_tuples(prediction))
        update_alike(metrics, guesses, (detached, target), context)

    return track


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _outputs(prediction: Any, num_rows: int) -> Any:
    """Return the tensors of a prediction on the CPU, with None for a cache object, a text or a number."""
    found = map_structure(lambda leaf: _output(leaf, num_rows), prediction)
    if all(leaf is None for leaf in leaves_in(found)):
        raise SpecError(_needed_outputs(num_rows, f"a {type(prediction).__name__} without tensors"))
    return found


def _output(leaf: Any, num_rows: int) -> torch.Tensor | None:
    if isinstance(leaf, torch.Tensor):
        if leaf.shape[:1] == (num_rows,):
            return leaf.cpu()
        raise SpecError(_needed_outputs(num_rows, f"shape {tuple(leaf.shape)}"))
    if isinstance(leaf, list | np.ndarray):  # these may contain outputs
        raise SpecError(_needed_outputs(num_rows, f"a {type(leaf).__name__}"))
    return None


def _needed_outputs(num_rows: int, got: str) -> str:
    return f"predict needs tensors with one entry per input row ({num_rows}) from the module, got {got}."
