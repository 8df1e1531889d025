"""Conversion of a user's loss on local rows to the value that one replica optimises and reports.

Every loss is a sum divided by a denominator: the number of rows, the number of counted labels, or the sum of weights.
The denominator counts the whole *global* batch, so that the division of rows among replicas does not change the loss.
If several batches make one step, or are evaluated together, the denominator counts all of them.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.nest import leaves_in, map_structure
from raydist.core.values import ReduceOp
from raydist.training.global_means import GlobalMeans, labels_that_count
from raydist.training.updates import class_by_name

if TYPE_CHECKING:
    from raydist.context.replica_context import ReplicaContext

LossKind = Literal["rows", "labels", "sum", "unknown"]
"""Denominator of a loss: the number of "rows", the number of counted "labels", none for a "sum", or "unknown": only the
code of the loss tells."""

Count = torch.Tensor | int

_CALLS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Number of calls of `is_checked_now` in this process, by loss function."""


@final
@dataclass(frozen=True, slots=True)
class BatchLoss:
    """A replica's part of the loss of a global batch.

    Attributes:
        objective: A scalar; the sum of its gradients over the replicas is the gradient of the global loss.
        denominator: Denominator of the global loss; None for a sum.
        total: This replica's part of the loss times the denominator, without gradients.
        weight: This replica's part of the denominator; 0 for a sum.
    """

    objective: torch.Tensor
    denominator: Count | None
    total: torch.Tensor
    weight: Count


def _loss_of_mean(mean: torch.Tensor, weight: Count, global_weight: Count) -> BatchLoss:
    """Return the loss of a replica from its local mean, its local denominator `weight` and the global denominator."""
    if isinstance(weight, torch.Tensor):
        mean = torch.where(weight == 0, 0.0, mean)  # the mean of no rows is NaN
        share: Any = (weight / torch.where(torch.as_tensor(global_weight) == 0, 1.0, global_weight)).to(mean.dtype)
    else:
        share = weight / global_weight
    return BatchLoss(mean * share, global_weight, mean.detach() * weight, weight)


def mean_loss(loss: Any, num_rows: int, global_weight: int) -> BatchLoss:
    """Return the loss of a mean over rows. `loss` is the mean over local rows, or one loss per row: (n, ...).

    >>> pieces = [mean_loss(torch.tensor([1.0, 2.0]), 2, 3), mean_loss(torch.tensor(6.0), 1, 3)]
    >>> sum(piece.objective.item() for piece in pieces)
    3.0
    """
    value = _as_tensor(loss)
    if value.ndim:
        _require_per_row(value, num_rows)
    return _loss_of_mean(value.mean(), num_rows, global_weight)


def loss_of(
    call: Callable[[], Any],
    kind: LossKind,
    num_rows: int,
    context: ReplicaContext,
    *,
    labels: tuple[Count, Count] | None = None,
    joins_batches: bool = False,
    check: Callable[[torch.Tensor], None] | None = None,
) -> BatchLoss:
    """Return the loss of a batch without weights.

    `call` computes the user's loss on local rows. For kind "labels", `labels` are the local and the global denominator.
    With `joins_batches`, several batches make one step, and a loss of several means must then have one denominator.
    `check` is called with a scalar loss of kind "unknown", which is assumed to be a mean over rows.
    """
    global_weight = context.global_num_rows or num_rows
    if labels is not None:
        return _loss_of_mean(_as_tensor(call()), *labels)
    if kind == "unknown":
        with GlobalMeans(context) as means:
            value = call()
        if isinstance(value, torch.Tensor) and means.is_global(value):
            return global_loss(value, means, joins_batches=joins_batches)
        # Only some means in the loss were made global. Compute the loss again, with local means only.
        loss = call() if means.means else value
        if is_pair(loss):
            return pair_loss(loss, context)
        if check is not None and isinstance(loss, torch.Tensor) and not loss.ndim:
            check(loss.detach())
        return mean_loss(loss, num_rows, global_weight)
    if kind == "sum":
        return sum_loss(call())
    return mean_loss(call(), num_rows, global_weight)


def is_checked_now(loss: Any) -> bool:
    """Count a call of a loss, and return True for the calls 1, 2, 4, 8, ...

    One check is not enough, because the first batch may not show that a loss is wrong.

    >>> [is_checked_now(is_pair) for _ in range(9)]
    [True, True, False, True, False, False, False, True, False]
    """
    try:
        number = _CALLS[loss] = _CALLS.get(loss, 0) + 1
    except TypeError:  # no weak references, or unhashable
        return True
    return number & (number - 1) == 0


def require_mean_over_rows(
    loss: Callable[[Any, Any], Any], prediction: Any, target: Any, num_rows: int, value: torch.Tensor
) -> None:
    """Raise InvalidArgumentError if the loss of all rows is not the mean of the losses of two parts of the rows.

    Do not raise if the check is impossible: with fewer than two rows, values that are not finite, or a loss that is not
    deterministic or does not accept parts of the rows.

    >>> rows = torch.tensor([1.0, 2.0, 6.0]), torch.zeros(3)
    >>> require_mean_over_rows(lambda p, t: (p - t).mean(), *rows, 3, torch.tensor(3.0))
    >>> require_mean_over_rows(lambda p, t: (p - t).sum(), *rows, 3, torch.tensor(9.0))
    Traceback (most recent call last):
        ...
    raydist.core.errors.InvalidArgumentError: A loss function must return a mean over its rows where several replicas \
or batches share the rows of a step: <lambda> gives 9 for 3 rows, but 1 for the first 1 and 8 for the others. \
Return one loss per row, or a pair (sum, denominator) such as ((loss * mask).sum(), mask.sum()). Or declare it: \
compile(loss_reduction="sum") for a sum over rows, "mean" to average what each replica computes from its own rows.
    """
    half = num_rows // 2
    leaves = [leaf for leaf in leaves_in((prediction, target)) if isinstance(leaf, torch.Tensor)]
    if not half or not math.isfinite(float(value)) or any(leaf.shape[:1] != (num_rows,) for leaf in leaves):
        return

    def loss_over(rows: slice) -> float:
        # A copy, because a call may change the module.
        own = copy.deepcopy(loss).double() if isinstance(loss, nn.Module) else loss
        return float(own(*map_structure(lambda leaf: _exact_part(leaf, rows), (prediction, target))))

    try:
        with torch.no_grad(), torch.random.fork_rng([value.device] if value.is_cuda else []):
            whole, again, first, rest = (loss_over(slice(*ends)) for ends in ((None,), (None,), (half,), (half, None)))
    except Exception:  # a loss that needs gradients, or a fixed number of rows, is valid
        return
    same = partial(math.isclose, rel_tol=1e-6, abs_tol=1e-6 * max(abs(first), abs(rest), 1e-6))
    mean = (first * half + rest * (num_rows - half)) / num_rows  # NaN if all labels of a half are ignored
    if same(whole, again) and not same(whole, mean):
        raise InvalidArgumentError(
            "A loss function must return a mean over its rows where several replicas or batches share the rows of a "
            f"step: {getattr(loss, '__name__', type(loss).__name__)} gives {whole:.5g} for {num_rows} rows, but "
            f"{first:.5g} for the first {half} and {rest:.5g} for the others. Return one loss per row, or a pair (sum, "
            'denominator) such as ((loss * mask).sum(), mask.sum()). Or declare it: compile(loss_reduction="sum") '
            'for a sum over rows, "mean" to average what each replica computes from its own rows.'
        )


def _exact_part(leaf: Any, rows: slice) -> Any:
    """Return some rows of a leaf, with floats as float64, so that rounding errors do not look like a wrong mean."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach()[rows].double() if leaf.is_floating_point() else leaf.detach()[rows]


def global_loss(loss: torch.Tensor, means: GlobalMeans, *, joins_batches: bool = False) -> BatchLoss:
    """Return the loss for a value computed from global means. Each replica has the same value.

    If the means differ in their denominators, the loss of several batches is weighted by the average denominator.
    """
    weight, denominator = (torch.stack(counts).mean(dim=0) for counts in zip(*means.counts, strict=True))
    if joins_batches and torch.is_grad_enabled():
        means.require_one_denominator(loss)
    return BatchLoss(loss, denominator, torch.where(weight == 0, 0.0, loss.detach() * weight), weight)


def sum_loss(loss: Any) -> BatchLoss:
    """Return the loss of a sum over local rows. `loss` is the sum, or one loss per row."""
    total = _as_tensor(loss).sum()
    return BatchLoss(total, None, total.detach(), 0)


def is_pair(loss: Any) -> bool:
    """Return True if a loss function returned a pair (sum, denominator)."""
    return isinstance(loss, tuple) and len(loss) == 2


def pair_loss(loss: tuple[Any, Any], context: ReplicaContext) -> BatchLoss:
    """Return the loss for a local sum and a local denominator. All replicas must call this together."""
    total = _as_tensor(loss[0]).sum()
    weight = torch.as_tensor(loss[1], dtype=torch.float64, device=total.device).detach().sum()
    global_weight: torch.Tensor = context.all_reduce(ReduceOp.SUM, weight)
    return BatchLoss(total / torch.where(global_weight == 0, 1.0, global_weight), global_weight, total.detach(), weight)


def kind_of(loss: Any, reduction: Literal["mean", "sum"] | None = None) -> LossKind:
    """Return the kind of a loss, from `reduction` if it is given, else from the class and settings of the loss.

    >>> kind_of(nn.MSELoss()), kind_of(nn.CrossEntropyLoss()), kind_of(nn.L1Loss(reduction="sum")), kind_of(min)
    ('rows', 'labels', 'sum', 'unknown')
    """
    if reduction is not None:
        return "sum" if reduction == "sum" else "rows"
    if declares_sum(loss):
        return "sum"
    if type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss):
        return "labels" if loss.reduction == "mean" else "rows"
    return "rows" if type(loss) in _public_modules() and _is_loss(type(loss)) else "unknown"


def label_count(loss: Any, target: Any, context: ReplicaContext) -> tuple[Count, Count] | None:
    """Return the local and the global denominator of a loss of kind "labels"; None if targets are not labels.

    All replicas must call this together. Before the forward pass they wait least for each other, because they have just
    received their batches.
    """
    if not isinstance(target, torch.Tensor) or target.is_floating_point():
        return None
    here = labels_that_count(target, loss.weight, loss.ignore_index)
    return here, context.all_reduce(ReduceOp.SUM, here)


def declares_sum(loss: Any) -> bool:
    """Return True if a loss declares reduction="sum": a torch module, or a partial of a function."""
    keywords = loss.keywords if isinstance(loss, partial) else {}
    declared = keywords.get("reduction", getattr(loss, "reduction", None))
    return isinstance(declared, str) and declared == "sum"


def loss_by_name(name: str) -> tuple[nn.Module, nn.Module]:
    """Return the torch loss module of a name ("mse", "MSELoss", "cross_entropy"), and the same with reduction="none".

    Raises:
        InvalidArgumentError: The name is unknown; the message lists the known names.
    """
    losses = {kind.__name__: kind for kind in _public_modules() if _is_loss(kind)}
    found = class_by_name(name, losses, "loss", suffix="Loss")
    return found(), found(reduction="none")


def _public_modules() -> list[type[nn.Module]]:
    found = vars(nn.modules.loss).values()
    kinds = [kind for kind in found if isinstance(kind, type) and issubclass(kind, nn.Module)]
    return [kind for kind in kinds if getattr(nn, kind.__name__, None) is kind]


def _is_loss(kind: type[nn.Module]) -> bool:
    """Return True for a class of losses that can be made without arguments and called with (prediction, target)."""
    takes_pair = list(inspect.signature(kind.forward).parameters)[1:] in (["input", "target"], ["log_input", "target"])
    needs_no_arguments = all(p.default is not p.empty for p in inspect.signature(kind).parameters.values())
    return takes_pair and needs_no_arguments and kind is not nn.NLLLoss2d  # a deprecated alias of NLLLoss


def weighted_loss(loss: Any, sample_weight: torch.Tensor, context: ReplicaContext) -> BatchLoss:
    """Return the loss for row weights (n,) or (n, 1). `loss` has one value per row, or several, which are averaged."""
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
    return pair_loss(((value.reshape(num_rows, -1).mean(dim=1) * weights).sum(), weights.sum()), context)


def _as_tensor(loss: Any) -> torch.Tensor:
    if isinstance(loss, torch.Tensor):
        return loss
    raise SpecError(
        "The loss must return a tensor (the mean over its rows, or one loss per row) or a pair (sum, denominator), got "
        f"{type(loss).__name__}."
    )


def _require_per_row(value: torch.Tensor, num_rows: int) -> None:
    if value.shape[0] != num_rows:
        raise SpecError(
            f"The loss must be a scalar or have one value per row, got shape {tuple(value.shape)} for {num_rows} rows."
        )
