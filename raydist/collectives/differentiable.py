"""Differentiable collectives on values of a training step.

The gradient is that of the global objective, the sum of w_j L_j over all replicas j: L_j is the loss of replica j, and
w_j is its share of the global batch's rows. The gradient reducer later multiplies the gradient of replica i by w_i. So
the backward of a collective returns the weighted sum of all upstream gradients, divided by w_i. Without weights, each
w_j is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from raydist.collectives.base import ALL_REDUCE, Communicator
from raydist.collectives.checked import CallLog, describe_call, exchange
from raydist.core.errors import InvalidArgumentError
from raydist.core.values import ReduceOp

Weights = Sequence[float] | None


def all_reduce(
    communicator: Communicator,
    tensor: torch.Tensor,
    op: ReduceOp,
    weights: Weights = None,
    log: CallLog | None = None,
) -> torch.Tensor:
    """Return the reduction of `tensor` over replicas, on every replica.

    Args:
        tensor: A result of :func:`promote`, with the same shape and dtype on all replicas.
        weights: Weight of each replica in the global objective; None for an unweighted sum of losses.

    Blocking: until all replicas have called this function, at most the communicator's limit.
    The backward blocks in the same way.

    Raises:
        CollectiveMismatchError: Replicas call different collectives.

    Source: tf.distribute.ReplicaContext.all_reduce (TensorFlow 2.x API).

    >>> from raydist.collectives.base import Membership
    >>> from raydist.collectives.single_rank import SingleRank
    >>> alone = SingleRank(Membership("g", generation=0, rank=0, world_size=1))
    >>> all_reduce(alone, torch.tensor(3.0), ReduceOp.MEAN)
    tensor(3.)
    """
    is_linear = op in (ReduceOp.SUM, ReduceOp.MEAN)
    call = describe_call(ALL_REDUCE[op], tensor, differentiable=_wants_gradient(tensor))
    differentiable = any(other.differentiable for other in exchange(communicator, call, log=log))
    if is_linear or not differentiable:
        result = tensor.detach().clone() if tensor.requires_grad else tensor.clone()
        communicator.all_reduce(result, op).wait()
        if not differentiable:
            return result
        return _apply(_AllReduce, _with_grad(tensor), (result,), communicator, op, weights)
    stacked = _apply(_AllGather, _with_grad(tensor.unsqueeze(0)), communicator, (1,) * communicator.world_size, weights)
    return _REDUCTIONS[op](stacked, 0)


def all_gather(communicator: Communicator, value: torch.Tensor, axis: int = 0, weights: Weights = None) -> torch.Tensor:
    """Concatenate all replicas' `value` along dimension `axis`, in rank order, on every replica.

    Args:
        value: A tensor with at least one dimension. Only the length along `axis` may differ between replicas.

    Blocking: as `all_reduce`.

    Raises:
        InvalidArgumentError: The values have no dimension `axis`.
        CollectiveMismatchError: Replicas call different collectives.

    Source: tf.distribute.ReplicaContext.all_gather (TensorFlow 2.x API).

    >>> from raydist.collectives.base import Membership
    >>> from raydist.collectives.single_rank import SingleRank
    >>> alone = SingleRank(Membership("g", generation=0, rank=0, world_size=1))
    >>> all_gather(alone, torch.tensor([1, 2]))
    tensor([1, 2])
    """
    tensor = torch.as_tensor(value)
    call = describe_call(f"all_gather(axis={axis})", tensor, differentiable=_wants_gradient(tensor))
    calls = exchange(communicator, call, ragged_axis=axis)
    require_axis(tensor, axis)
    lengths = tuple(other.shape[axis] for other in calls)
    rows_first = tensor.movedim(axis, 0)
    if any(other.differentiable for other in calls):
        gathered = _apply(_AllGather, _with_grad(rows_first), communicator, lengths, weights)
    else:
        gathered = _gather_rows(rows_first.detach(), communicator, lengths)
    return gathered.movedim(0, axis)


def require_axis(tensor: torch.Tensor, axis: int) -> None:
    """Raise InvalidArgumentError unless `tensor` has a dimension `axis`."""
    if not -tensor.dim() <= axis < tensor.dim():
        raise InvalidArgumentError(
            f"all_gather needs values with a dimension {axis}, got shape {tuple(tensor.shape)}. "
            "Give a scalar a dimension with reshape(1)."
        )


class _AllReduce(torch.autograd.Function):
    """A SUM or MEAN whose result the caller has computed already."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        result: tuple[torch.Tensor],
        communicator: Communicator,
        op: ReduceOp,
        weights: Weights,
    ) -> torch.Tensor:
        ctx.communicator, ctx.op, ctx.weights = communicator, op, weights
        return result[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        total = _total(upstream, ctx.communicator, ctx.weights)
        if ctx.op is ReduceOp.MEAN:
            total = total / ctx.communicator.world_size
        return total, None, None, None, None


class _AllGather(torch.autograd.Function):
    """Concatenation along the first dimension; replica i has `lengths[i]` rows."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, communicator: Communicator, lengths: tuple[int, ...], weights: Weights
    ) -> torch.Tensor:
        ctx.communicator, ctx.lengths, ctx.weights = communicator, lengths, weights
        return _gather_rows(tensor, communicator, lengths)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        rank = ctx.communicator.rank
        start = sum(ctx.lengths[:rank])
        total = _total(upstream, ctx.communicator, ctx.weights)
        return total[start : start + ctx.lengths[rank]], None, None, None


def _total(upstream: torch.Tensor, communicator: Communicator, weights: Weights) -> torch.Tensor:
    """Return the weighted sum of all replicas' upstream gradients, divided by this replica's weight."""
    own = 1.0 if weights is None else weights[communicator.rank]
    # A replica with weight 0 may have NaN gradients, and NaN times 0 is NaN.
    total = upstream * own if own else torch.zeros_like(upstream)
    communicator.all_reduce(total, ReduceOp.SUM).wait()
    return total / own if own else torch.zeros_like(upstream)


def _gather_rows(tensor: torch.Tensor, communicator: Communicator, lengths: tuple[int, ...]) -> torch.Tensor:
    parts = [tensor.new_empty(length, *tensor.shape[1:]) for length in lengths]
    communicator.all_gather_rows(parts, tensor).wait()
    return torch.cat(parts)


def _wants_gradient(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _with_grad(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with `requires_grad`, so that this replica joins the collectives of the backward."""
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()


def promote(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Convert a tensor to the result's dtype: the default float for a MEAN of integers, int64 for a SUM of bools."""
    if op is ReduceOp.MEAN and not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.to(torch.get_default_dtype())
    if op is ReduceOp.SUM and tensor.dtype is torch.bool:
        return tensor.to(torch.int64)
    return tensor


def _apply(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    apply: Any = function.apply  # torch leaves it untyped
    result: torch.Tensor = apply(*args)
    return result


# amin and amax split the gradient evenly between equal values.
_REDUCTIONS: dict[ReduceOp, Callable[[torch.Tensor, int], torch.Tensor]] = {
    ReduceOp.MIN: torch.amin,
    ReduceOp.MAX: torch.amax,
    ReduceOp.PRODUCT: torch.prod,
}
