"""Metrics that guess from the values of a batch what its predictions are.

torchmetrics' classification metrics take predictions within [0, 1] for probabilities and all others for logits, batch
by batch. A replica's piece may look like probabilities where the whole batch does not: so the replicas ask each other
how their pieces look, and where they look different, such metrics see the whole batch, on one replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torchmetrics import Metric

from raydist.context.replica_context import ReplicaContext
from raydist.nest import leaves_in
from raydist.values import ReduceOp

__all__ = ["guessing", "update_alike"]

# They take the largest of the scores, whatever the scores are.
_NEVER_GUESS = {"MulticlassStatScores", "MulticlassConfusionMatrix", "MulticlassExactMatch"}


def guessing(metrics: Mapping[str, Metric]) -> dict[str, bool]:
    """The names of the metrics that guess, each with whether it looks at a part of the predictions only.

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
    metrics: Mapping[str, Metric], guesses: Mapping[str, bool], batch: tuple[Any, Any], context: ReplicaContext
) -> None:
    """Update metrics with one replica's (prediction, target), so that together they are what the whole batch gives.

    Args:
        metrics: All of them, by name.
        guesses: What `guessing` says of them.
        batch: What `Metric.update` takes.
        context: The replica's.
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
    """Whether a metric that looks at any replica's predictions guesses the same. Waits for all replicas."""
    leaves = [leaf for leaf in leaves_in(prediction) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    if not leaves:
        return True
    within = torch.stack([((leaf >= 0) & (leaf <= 1)).all() for leaf in leaves])
    found = context.all_reduce(ReduceOp.MAX, torch.stack([within, ~within]).to(torch.int32))
    some_within, some_beyond = found.bool()
    # Who ignores rows may see only probabilities in a piece that has logits as well.
    return not bool((some_beyond if in_part else some_within & some_beyond).any())


def _is_first_with_rows(context: ReplicaContext) -> bool:
    rank = context.replica_id_in_sync_group
    return bool(rank == context.all_reduce(ReduceOp.MIN, rank))
