"""Losses with the denominator of the global batch."""

from __future__ import annotations

import torch

from raydist.context.current import in_cross_replica_context
from raydist.errors import FailedPreconditionError, InvalidArgumentError, SpecError
from raydist.strategies.default import get_replica_context, get_strategy

__all__ = ["compute_average_loss"]


def compute_average_loss(
    per_example_loss: torch.Tensor,
    sample_weight: torch.Tensor | float | None = None,
    global_batch_size: int | None = None,
) -> torch.Tensor:
    """Return this replica's share of the global mean: the sum of its losses over the *global* number of rows.

    The shares of all replicas add up to the mean over the global batch. Use it with
    `RunOptions(gradient_reduce_op=ReduceOp.SUM)`; a plain local mean needs neither. Call it in step functions; it does
    not block.

    Shapes: (rows, ...) -> ().

    Args:
        per_example_loss: (rows, ...), one or more values per row; the values of a row are added.
        sample_weight: Multiplies the losses, broadcast from the left: (rows,) or a number.
        global_batch_size: Rows of the global batch, >= 0; None takes `ctx.global_num_rows`, and without a distributed
            batch this replica's rows times the number of replicas.

    Returns:
        A scalar of the losses' dtype; 0 for a global batch without rows. Differentiable.

    Raises:
        FailedPreconditionError: Called in a scope, not in a step.
        InvalidArgumentError: The losses are a single number, or `global_batch_size` is negative.
        SpecError: `global_batch_size` is not an int.

    Source: tf.nn.compute_average_loss.

    >>> compute_average_loss(torch.tensor([1.0, 3.0]), global_batch_size=4)
    tensor(1.)
    """
    if in_cross_replica_context():
        raise FailedPreconditionError(
            f"compute_average_loss must be called in the step function that strategy.run runs, this is the scope of a "
            f"{type(get_strategy()).__name__}. Move the call into the step."
        )
    losses = torch.as_tensor(per_example_loss)
    if losses.dim() == 0:
        raise InvalidArgumentError(
            "per_example_loss must have one loss per row, got a single number (a shape of ()). Give the loss function "
            "reduction='none'."
        )
    size = _global_size(global_batch_size, len(losses))
    if sample_weight is not None:
        weight = torch.as_tensor(sample_weight, dtype=losses.dtype, device=losses.device)
        losses = losses * weight.reshape(weight.shape + (1,) * (losses.dim() - weight.dim()))
    return losses.sum() / size if size else losses.sum() * 0.0


def _global_size(given: int | None, num_rows: int) -> int:
    if given is None:
        context = get_replica_context()
        rows = context.global_num_rows
        return num_rows * context.num_replicas_in_sync if rows is None else rows
    if not isinstance(given, int) or isinstance(given, bool):
        raise SpecError(f"global_batch_size must be an int, got {given!r}.")
    if given < 0:
        raise InvalidArgumentError(f"global_batch_size must be >= 0, got {given}.")
    return given
