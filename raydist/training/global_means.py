"""Means of torch's loss functions over the global batch, in loss code that sees the rows of one replica only.

A model that computes its own loss, or a loss function of the user, ends in functions such as
`torch.nn.functional.cross_entropy`, which divide by a property of the local rows: counted labels, class weights,
elements. While a `GlobalMeans` is active, each of these functions returns the mean over the rows of all replicas; its
gradients are this replica's part of the gradients of that mean.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, final

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from raydist.core.errors import InvalidArgumentError
from raydist.core.values import ReduceOp

if TYPE_CHECKING:
    from raydist.context.replica_context import ReplicaContext

# torch 2.11 has no linear_cross_entropy.
_BY_LABELS = frozenset({F.cross_entropy, F.nll_loss, getattr(F, "linear_cross_entropy", F.cross_entropy)})
_BY_WEIGHTS = frozenset({F.mse_loss, F.l1_loss, F.huber_loss})
_LOSSES = frozenset(
    {value for name, value in vars(F).items() if name.endswith("_loss") and inspect.isfunction(value)}
    | {*_BY_LABELS, *_BY_WEIGHTS, F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.kl_div}
)
_CONSTANTS = frozenset({torch.zeros, torch.ones, torch.zeros_like, torch.ones_like, torch.Tensor.new_zeros})


def labels_that_count(
    target: torch.Tensor, weight: torch.Tensor | None = None, ignore_index: int | None = -100
) -> torch.Tensor:
    """Return the number by which torch divides the cross entropy of class numbers, as a float64 scalar.

    >>> labels_that_count(torch.tensor([[1, -100, 0]]))
    tensor(2., dtype=torch.float64)
    """
    counts = target != (-100 if ignore_index is None else ignore_index)
    if weight is not None:
        counts = weight[torch.where(counts, target, 0)] * counts
    return counts.sum(dtype=torch.float64)


@final
class GlobalMeans(TorchFunctionMode):
    """A mode that replaces local means of torch's losses by global ones, and tracks tensors computed from these.

    All replicas must call the same loss functions in the same order: each call is one small all-reduce.

    Attributes:
        means: The global means, one for each call of a loss function with reduction="mean".
        counts: Pairs of the mean's denominator on this replica and on all replicas together.

    >>> from raydist.context.replica_context import ReplicaContext
    >>> x = torch.ones(2, 1, requires_grad=True)
    >>> with GlobalMeans(rd.get_replica_context()) as means:
    ...     loss = F.mse_loss(x, torch.zeros(2, 1)) / 2
    >>> loss.item(), means.is_global(loss), means.is_global(x.mean())
    (0.5, True, False)
    """

    def __init__(self, context: ReplicaContext) -> None:
        super().__init__()
        self._context = context
        # Tensors with one value on all replicas, by id; kept alive, so that no other tensor gets the same id.
        self._global: dict[int, torch.Tensor] = {}
        self.means: list[torch.Tensor] = []
        self.counts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _LOSSES:
            if (count := _denominator(func, args, kwargs)) is not None:
                result = self._global_mean(result, count)
        elif func in _CONSTANTS:
            self._mark(result)
        elif self._global:
            self._follow(func, args, kwargs, result)
        return result

    def is_global(self, value: Any) -> bool:
        """Return True for a tensor that is computed from global means and constants alone."""
        return self._global.get(id(value)) is value

    def require_one_denominator(self, loss: torch.Tensor) -> None:
        """Raise InvalidArgumentError unless a global loss is one mean, or a sum of means with the same denominator."""
        first, *others = self.counts
        same = all(bool(count[1] == first[1]) for count in others)
        means = [mean for mean in self.means if mean.requires_grad]
        if same and loss.requires_grad and means:
            slopes = torch.autograd.grad(loss, means, retain_graph=True, allow_unused=True)
            pairs = zip(slopes, means, strict=True)
            linear = sum((slope * mean.detach() for slope, mean in pairs if slope is not None), torch.zeros_like(loss))
            same = torch.allclose(linear, loss.detach(), rtol=1e-3, equal_nan=True)
        if not same:
            raise InvalidArgumentError(
                f"accumulate_steps needs a loss that is one mean, or a sum of means over the same rows or labels, as "
                f"microbatches do: the mean over several batches is not known of others. Got a loss of "
                f"{len(self.counts)} means, with "
                f"the denominators {[float(count[1]) for count in self.counts]}. Use larger batches instead."
            )

    def _global_mean(self, mean: torch.Tensor, count: torch.Tensor | float) -> torch.Tensor:
        here = torch.as_tensor(count, dtype=torch.float64, device=mean.device)
        local = torch.where(here == 0, 0.0, mean)  # the mean of no elements is NaN
        sums = self._context.all_reduce(ReduceOp.SUM, torch.stack([local.detach().double() * here, here]))
        total, everywhere = sums.unbind()
        part = local * (here / torch.where(everywhere == 0, 1.0, everywhere)).to(mean.dtype)
        result: torch.Tensor = part + ((total / everywhere).to(mean.dtype) - part).detach()
        self._mark(result)
        self.means.append(result)
        self.counts.append((here, everywhere))
        return result

    def _mark(self, tensor: torch.Tensor) -> None:
        self._global[id(tensor)] = tensor

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Mark results of global tensors alone as global; unmark tensors that a local tensor has changed in place."""
        given = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
        if not any(map(self.is_global, given)):
            return
        if all(map(self.is_global, given)):
            for tensor in _tensors((result,)):
                self._mark(tensor)
            return
        for tensor in _tensors((args[0] if func is torch.Tensor.__setitem__ else result,)):
            self._global.pop(id(tensor), None)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


@functools.cache
def _signature(func: Any) -> inspect.Signature:
    return inspect.signature(func)


def _denominator(func: Any, args: Any, kwargs: Any) -> torch.Tensor | float | None:
    """Return a number proportional to the denominator of a loss function's mean; None without a denominator."""
    bound = _signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if given["reduction"] not in ("mean", "batchmean") or False in (given.get("reduce"), given.get("size_average")):
        return None
    target: Any = given.get("target")
    weight: Any = given.get("weight")
    if func in _BY_LABELS and not target.is_floating_point():
        return labels_that_count(target, weight, given["ignore_index"])
    if func is F.ctc_loss:
        return float(len(given["target_lengths"]))
    sizes = [value.shape for value in list(given.values())[:2] if isinstance(value, torch.Tensor)]
    if func in _BY_WEIGHTS and weight is not None:
        summed: torch.Tensor = weight.expand(torch.broadcast_shapes(*sizes)).sum(dtype=torch.float64)
        return summed
    return float(max(size.numel() for size in sizes))
