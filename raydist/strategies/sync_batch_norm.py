"""Batch normalisation over the global batch."""

from __future__ import annotations

from typing import Any, Self, final

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from raydist.collectives.reducing import HALVES
from raydist.context.current import in_cross_replica_context
from raydist.context.replica_context import ReplicaContext
from raydist.errors import InvalidArgumentError
from raydist.strategies.default import get_replica_context
from raydist.values import ReduceOp

__all__ = ["SyncBatchNorm"]


@final
class SyncBatchNorm(_BatchNorm):
    """Batch normalisation whose statistics are those of the global batch, however it is split.

    With it a network trains on N replicas to the parameters of one (torch.nn.BatchNorm takes each replica's own rows).
    Outside of `strategy.run` and with one replica it is torch.nn.BatchNorm1d / 2d / 3d.

    Shapes: (rows, features, ...) -> the same.

    Blocking: two small all-reduces in a training step's forward pass, two in its backward pass (limit of each:
    `Timeouts.collective_s`). All replicas must run it alike.

    It takes what torch.nn.BatchNorm1d takes:
        num_features: Length of dimension 1.
        eps: Added to the variance, so that nothing is divided by zero.
        momentum: Share of the present batch in the running statistics; None: the mean over all batches so far.
        affine: Learn a weight and a bias per feature.
        track_running_stats: Keep running statistics, which evaluation uses; without them it uses its batch's own.
        device: Where parameters and buffers are made.
        dtype: Of parameters and buffers.
        bias: Of versions of torch that have it: learn the bias too. False is for one replica only.

    Source: torch.nn.SyncBatchNorm; tf.keras.layers.BatchNormalization(synchronized=True).

    >>> SyncBatchNorm(3)(torch.ones(4, 3)).shape
    torch.Size([4, 3])
    """

    @classmethod
    def convert(cls, module: torch.nn.Module) -> torch.nn.Module:
        """Replace every BatchNorm layer in `module`; layers share their parameters and buffers with the replaced ones.

        Call it under the scope, before an optimizer is made.

        Args:
            module: Changed in place, submodules of submodules included.

        Returns:
            `module`, or the new layer if it is itself a BatchNorm layer.

        Source: torch.nn.SyncBatchNorm.convert_sync_batchnorm.

        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        >>> type(SyncBatchNorm.convert(model)[1]).__name__
        'SyncBatchNorm'
        """
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            return cls._like(module)
        for name, child in module.named_children():
            setattr(module, name, cls.convert(child))
        return module

    @classmethod
    def _like(cls, layer: _BatchNorm) -> Self:
        made = cls(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        if layer.affine:
            made.weight, made.bias = layer.weight, layer.bias
        if layer.track_running_stats:
            made.running_mean, made.running_var = layer.running_mean, layer.running_var
            made.num_batches_tracked = layer.num_batches_tracked
        return made.train(layer.training)

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 - torch's name of the argument
        if input.dim() < 2:
            raise InvalidArgumentError(
                f"SyncBatchNorm needs (rows, features, ...), got shape {tuple(input.shape)}. Add a dimension of rows."
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name of the argument
        """Normalise by the mean and variance of all replicas' rows; in evaluation by the running statistics.

        Blocks as the class says. Differentiable; replicas that stand in count nothing.

        Shapes: (rows, features, ...) -> the same.

        Args:
            input: This replica's rows.

        Returns:
            A new tensor, of the dtype of `input` if that has 16 bits; in training the running statistics are brought
            forward as well.

        Raises:
            InvalidArgumentError: `input` has fewer than two dimensions, or all replicas together have a single value
                per feature.
            CollectiveMismatchError: (on all replicas) another replica called another collective.

        >>> layer = SyncBatchNorm(1, affine=False)
        >>> layer(torch.tensor([[1.0], [3.0]])).flatten().round(decimals=3)
        tensor([-1.,  1.])
        """
        context = None if in_cross_replica_context() else get_replica_context()
        uses_batch = self.training or self.running_mean is None
        if context is None or context.num_replicas_in_sync == 1 or not uses_batch:
            return super().forward(input)
        self._check_input_dim(input)
        # Sums and numbers of rows of 16 bits soon leave their range; torch's own layers add up in float32, too.
        rows = input.float() if input.dtype in HALVES else input
        mean, variance, count = _global_moments(context, rows)
        if self.training and self.running_mean is not None:
            self._track(mean.detach(), variance.detach(), count)
        shape = (1, -1) + (1,) * (input.dim() - 2)
        normal = (rows - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)
        scaled = normal if not self.affine else normal * self.weight.view(shape) + self.bias.view(shape)
        return scaled.to(input.dtype) if rows is not input else scaled

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        running_mean: Any = self.running_mean
        running_var: Any = self.running_var
        tracked: Any = self.num_batches_tracked
        tracked.add_(1)
        factor = 1.0 / float(tracked) if self.momentum is None else self.momentum
        running_mean.lerp_(mean.to(running_mean.dtype), factor)
        running_var.lerp_((variance * count / (count - 1).clamp(min=1)).to(running_var.dtype), factor)


def _global_moments(context: ReplicaContext, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean, biased variance and count over all rows of all replicas (the context leaves out those that stand in)."""
    axes = [axis for axis in range(rows.dim()) if axis != 1]
    own = rows.new_tensor([rows.numel() / rows.shape[1]])
    reduced = context.all_reduce(ReduceOp.SUM, torch.cat([rows.sum(axes), own]))
    count = reduced[-1:].detach()
    _require_several(context, rows, count)
    mean = reduced[:-1] / count
    # A second pass over the differences: sums of squares would cancel where the mean is large.
    shape = (1, -1) + (1,) * (rows.dim() - 2)
    squares = (rows - mean.view(shape)).square().sum(axes)
    return mean, context.all_reduce(ReduceOp.SUM, squares) / count, count


def _require_several(context: ReplicaContext, rows: torch.Tensor, count: torch.Tensor) -> None:
    """As torch for one replica. Alike on all: who has several rows of its own need not look, nor wait for a GPU."""
    may_be_one = context.num_rows == 0 or rows.numel() <= rows.shape[1]
    if may_be_one and float(count) <= 1:
        raise InvalidArgumentError(
            "SyncBatchNorm expected more than 1 value per channel when training, over all replicas together, got "
            f"{float(count):g} in this global batch: its variance is unknown. Use larger batches (drop_remainder=True "
            "leaves out a last one that is smaller), or module.eval()."
        )
