"""Batch normalization over the global batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, final

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.overrides import TorchFunctionMode

from raydist.collectives.tensors import HALVES
from raydist.compat.torch_internals import BatchNorm, num_writes
from raydist.context.current import in_cross_replica_context
from raydist.context.replica_context import ReplicaContext
from raydist.core.errors import InvalidArgumentError
from raydist.core.values import ReduceOp
from raydist.strategies.functions import get_replica_context


@final
class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """Batch normalization with the statistics of the global batch, however it is split.

    With this layer N replicas train the same parameters as one (torch.nn.BatchNorm uses each replica's own rows).
    Outside of `strategy.run` and with one replica it is torch.nn.BatchNorm1d / 2d / 3d.

    Shapes: (rows, features, ...) -> the same.

    Blocks for two small all-reduces in a training step's forward pass and two in its backward pass (limit of each:
    `Timeouts.collective_s`). All replicas must run it alike.

    The arguments are those of torch.nn.BatchNorm1d:
        num_features: Length of dimension 1.
        eps: Added to the variance, to avoid a division by zero.
        momentum: Weight of the present batch in the running statistics; None: the mean over all batches so far.
        affine: Learn a weight and a bias per feature.
        track_running_stats: Keep running statistics for evaluation; without them evaluation uses those of its batch.
        device: Device of parameters and buffers.
        dtype: Type of parameters and buffers.
        bias: In versions of torch with this argument: learn the bias, too. False works with one replica only.

    Source: torch.nn.SyncBatchNorm; tf.keras.layers.BatchNormalization(synchronized=True).

    >>> SyncBatchNorm(3)(torch.ones(4, 3)).shape
    torch.Size([4, 3])
    """

    # Not the constructor of torch.nn.SyncBatchNorm, which takes a process group.
    __init__ = torch.nn.BatchNorm1d.__init__

    @classmethod
    def convert(cls, module: torch.nn.Module) -> torch.nn.Module:
        """Make every BatchNorm layer in `module` use the statistics of the global batch.

        Call it under the scope, before the first step. Layers of torch (torch.nn.SyncBatchNorm included, which the
        scope converts by itself) become layers of this class. A layer of a derived class keeps its class and its
        forward, in which `torch.nn.functional.batch_norm` then uses the global batch. Layers keep their parameters,
        buffers, hooks and names.

        Args:
            module: Changed in place, with all submodules.

        Returns:
            The argument `module`.

        Raises:
            InvalidArgumentError: A lazy layer does not know its number of features yet.

        Source: torch.nn.SyncBatchNorm.convert_sync_batchnorm.

        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        >>> type(SyncBatchNorm.convert(model)[1]).__name__
        'SyncBatchNorm'
        """
        for layer in module.modules():
            if isinstance(layer, LazyModuleMixin) and isinstance(layer, BatchNorm) and layer.has_uninitialized_params():
                raise InvalidArgumentError(
                    f"SyncBatchNorm.convert needs layers that know their number of features, got a "
                    f"{type(layer).__name__} before its first call. Call the model on a batch first."
                )
            if type(layer) in _OF_TORCH:
                layer.__class__ = cls
            elif isinstance(layer, BatchNorm) and not isinstance(layer, cls):
                _normalise_globally(layer)
        return module

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name of the argument
        """Normalize by the mean and variance of all replicas' rows; in evaluation by the running statistics.

        Blocks as described for the class. Differentiable; padding rows do not count.

        Shapes: (rows, features, ...) -> the same.

        Args:
            input: This replica's rows.

        Returns:
            A new tensor, of the dtype of `input` if that has 16 bits; in training the running statistics are updated,
            too.

        Raises:
            InvalidArgumentError: `input` has fewer than two dimensions, or all replicas together have a single value
                per feature.
            CollectiveMismatchError: (on all replicas) another replica called another collective.

        >>> layer = SyncBatchNorm(1, affine=False)
        >>> layer(torch.tensor([[1.0], [3.0]])).flatten().round(decimals=3)
        tensor([-1.,  1.])
        """
        if input.dim() < 2:
            raise InvalidArgumentError(
                f"SyncBatchNorm needs (rows, features, ...), got shape {tuple(input.shape)}. Add a dimension of rows."
            )
        with _GlobalBatchNorm():
            return torch.nn.BatchNorm1d.forward(self, input)


_NOTE = "_raydist_normalised_globally"
_OF_TORCH = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


def adopt_layer(obj: Any) -> None:
    """Convert a torch.nn.SyncBatchNorm in a scope to a layer with the statistics of all replicas."""
    if type(obj) is torch.nn.SyncBatchNorm:
        obj.__class__ = SyncBatchNorm


def _normalise_globally(layer: torch.nn.Module) -> None:
    """Make calls of `torch.nn.functional.batch_norm` in a layer's forward use the global batch. May be called twice."""
    if not hasattr(layer, _NOTE):
        setattr(layer, _NOTE, True)
        layer.register_forward_pre_hook(_begin)
        layer.register_forward_hook(_end, always_call=True)


_open: ContextVar[tuple[_GlobalBatchNorm, ...]] = ContextVar("raydist_batch_norms", default=())


def _begin(layer: torch.nn.Module, _: Any) -> None:
    """Enter the mode before the forward of a layer."""
    mode = _GlobalBatchNorm(layer)
    mode.__enter__()  # type: ignore[no-untyped-call]  # torch's
    _open.set((*_open.get(), mode))


def _end(layer: torch.nn.Module, _: Any, output: Any) -> None:
    """Leave the mode after the forward, also after an error."""
    *before, mode = _open.get()
    _open.set(tuple(before))
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's
    if output is not None:
        mode.require_calls()


class _GlobalBatchNorm(TorchFunctionMode):
    """While this mode is active, batch_norm uses the batch statistics of the global batch.

    `layer` is a layer of a derived class, whose forward runs in the mode.
    """

    def __init__(self, layer: Any = None) -> None:
        super().__init__()
        self._layer = layer
        self._num_calls = 0
        self._version = _version(layer)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.nn.functional.batch_norm:
            return func(*args, **(kwargs or {}))
        self._num_calls += 1
        given = _SIGNATURE.bind(*args, **(kwargs or {}))
        given.apply_defaults()
        context = _context_of_several()
        if context is None or not given.arguments["training"]:
            return func(*args, **(kwargs or {}))
        return _batch_norm(context, **given.arguments)

    def require_calls(self) -> None:
        """Raise if the forward computed its statistics in another way."""
        if self._num_calls or _context_of_several() is None or not self._layer.training:
            return
        if self._layer.running_mean is None or _version(self._layer) != self._version:
            raise InvalidArgumentError(
                f"SyncBatchNorm.convert needs a forward that calls torch.nn.functional.batch_norm, but that of "
                f"{type(self._layer).__name__} takes statistics of its own: they would be each replica's. Use "
                "rd.SyncBatchNorm in its place."
            )


_SIGNATURE = inspect.signature(torch.nn.functional.batch_norm)


def _version(layer: Any) -> int:
    running_mean = getattr(layer, "running_mean", None)
    return 0 if running_mean is None else num_writes(running_mean)


def _context_of_several() -> ReplicaContext | None:
    """Return the context of a replica that has peers; None elsewhere."""
    context = None if in_cross_replica_context() else get_replica_context()
    return context if context is not None and context.num_replicas_in_sync > 1 else None


def _batch_norm(
    context: ReplicaContext,
    input: torch.Tensor,  # noqa: A002 - torch's name of the argument
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> torch.Tensor:
    """Compute torch.nn.functional.batch_norm with the rows of all replicas."""
    # Sums and counts in 16 bits soon leave their range; torch's own layers add up in float32, too.
    rows = input.float() if input.dtype in HALVES else input
    mean, variance, count = _global_moments(context, rows)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((variance * count / (count - 1).clamp(min=1)).to(running_var.dtype), momentum)
    shape = (1, -1) + (1,) * (input.dim() - 2)
    result = (rows - mean.view(shape)) * torch.rsqrt(variance + eps).view(shape)
    if weight is not None:
        result = result * weight.view(shape)
    if bias is not None:
        result = result + bias.view(shape)
    return result.to(input.dtype) if rows is not input else result


def _global_moments(context: ReplicaContext, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean, biased variance and count over the rows of all replicas (all_reduce leaves out padding rows)."""
    axes = [axis for axis in range(rows.dim()) if axis != 1]
    own = rows.new_tensor([rows.numel() / rows.shape[1]])
    reduced = context.all_reduce(ReduceOp.SUM, torch.cat([rows.sum(axes), own]))
    count = reduced[-1:].detach()
    _require_several(context, rows, count)
    mean = reduced[:-1] / count
    # A second pass over the differences: sums of squares would cancel for a large mean.
    shape = (1, -1) + (1,) * (rows.dim() - 2)
    squares = (rows - mean.view(shape)).square().sum(axes)
    return mean, context.all_reduce(ReduceOp.SUM, squares) / count, count


def _require_several(context: ReplicaContext, rows: torch.Tensor, count: torch.Tensor) -> None:
    """Raise like torch for a single value. A replica with several rows skips the check, which waits for a GPU."""
    may_be_one = context.num_rows == 0 or rows.numel() <= rows.shape[1]
    if may_be_one and float(count) <= 1:
        raise InvalidArgumentError(
            "SyncBatchNorm expected more than 1 value per channel when training, over all replicas together, got "
            f"{float(count):g} in this global batch: its variance is unknown. Use larger batches (drop_remainder=True "
            "leaves out a last one that is smaller), or module.eval()."
        )
