"""`compile(loss="model")`: modules that compute their own loss, as Hugging Face models do."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.nest import leaves_in, map_structure
from raydist.training.elements import apply_module
from raydist.training.global_means import GlobalMeans
from raydist.training.losses import BatchLoss, LossKind, global_loss, is_pair, mean_loss, pair_loss, sum_loss

if TYPE_CHECKING:
    from raydist.context.replica_context import ReplicaContext


def call_module(module: nn.Module, batch: Any) -> Any:
    """Call a module with a batch: a dict as keyword arguments, a plain tuple as arguments."""
    return module(**batch) if isinstance(batch, Mapping) else apply_module(module, batch)


@final
@dataclass(frozen=True, slots=True)
class LossAndOutputs:
    """The result of a module that computes its own loss: the loss, and the whole result.

    >>> LossAndOutputs.of((torch.tensor(2.0), torch.ones(3)), nn.Identity()).loss
    tensor(2.)
    """

    loss: Any
    returned: Any

    @classmethod
    def of(cls, returned: Any, module: nn.Module) -> LossAndOutputs:
        """Find the loss in a result: `.loss`, `["loss"]`, the first item of a tuple, or a single tensor.

        Raises:
            SpecError: The result has no loss.
        """
        loss = returned
        if isinstance(returned, Mapping):
            loss = returned.get("loss")
        elif hasattr(returned, "loss"):
            loss = returned.loss
        elif isinstance(returned, tuple) and returned:
            loss = returned[0]
        if isinstance(loss, torch.Tensor) or is_pair(loss):
            return cls(loss, returned)
        raise SpecError(
            'With loss="model" the module must return its loss, as .loss, ["loss"], the first of a tuple, or alone: '
            f"{type(module).__name__} returned a {type(returned).__name__} without one. Does the batch hold labels?"
        )

    def logits(self, module: nn.Module) -> Any:
        """Return the predictions for metrics."""
        found = None
        if isinstance(self.returned, Mapping):
            found = self.returned.get("logits")
        elif hasattr(self.returned, "logits"):
            found = self.returned.logits
        elif isinstance(self.returned, tuple) and len(self.returned) > 1:
            found = self.returned[1]
        if found is None:
            raise SpecError(
                f'Metrics with loss="model" need .logits, ["logits"], or a tuple (loss, logits), got a '
                f"{type(self.returned).__name__} of {type(module).__name__}. Leave the metrics out."
            )
        return found

    def metric_arguments(self) -> Mapping[str, tuple[Any, ...]] | None:
        """Return the arguments of each metric's `update` by the metric's name, if the module returns such."""
        return self.returned.get("metric_arguments") if isinstance(self.returned, Mapping) else None

    @staticmethod
    def labels(batch: Any) -> Any:
        """Return the labels for metrics."""
        if isinstance(batch, Mapping):
            for name in ("labels", "label"):
                if name in batch:
                    return batch[name]
        elif isinstance(batch, tuple) and len(batch) > 1:
            return batch[-1]
        shown = f"the keys {sorted(batch)}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise SpecError(
            f'Metrics with loss="model" need batches with "labels", or tuples whose last part is these, got {shown}. '
            "Leave the metrics out."
        )


def without_loss(returned: Any, num_rows: int) -> Any:
    """Return the outputs with one entry per row, without loss, key-value caches and values that are not tensors.

    Raises:
        SpecError: There are no such outputs.

    >>> without_loss({"loss": torch.tensor(2.0), "logits": torch.ones(3, 2), "past_key_values": None}, 3).keys()
    dict_keys(['logits'])
    """
    if dataclasses.is_dataclass(returned):
        returned = {field.name: getattr(returned, field.name) for field in dataclasses.fields(returned)}
    found: Any = None
    if isinstance(returned, Mapping):
        found = {name: part for name, part in returned.items() if name != "loss" and _has_rows(part, num_rows)}
    elif isinstance(returned, tuple | list):
        parts = tuple(part for part in returned if _has_rows(part, num_rows))
        found = parts[0] if len(parts) == 1 else parts
    elif _has_rows(returned, num_rows):
        found = returned
    if isinstance(found, torch.Tensor) or found:
        return map_structure(lambda leaf: leaf, found)
    raise SpecError(
        f"predict needs outputs with one entry per input row ({num_rows}) beside the loss, got none in a "
        f"{type(returned).__name__}. Let the module return them, as .logits or in a tuple (loss, logits)."
    )


def _has_rows(part: Any, num_rows: int) -> bool:
    leaves = leaves_in(tuple(part) if isinstance(part, list) else part)
    return bool(leaves) and all(isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (num_rows,) for leaf in leaves)


def model_loss(
    loss: Any,
    kind: LossKind,
    means: GlobalMeans | None,
    num_rows: int,
    context: ReplicaContext,
    *,
    joins_batches: bool = False,
) -> BatchLoss:
    """Return the loss of a batch from the loss that the module computed on local rows.

    For kind "unknown", `means` was active during the forward pass. With `joins_batches`, several batches make one step,
    so their denominators must be known.

    Raises:
        InvalidArgumentError: The loss is not computed from torch's means; the message says what to do.
    """
    everywhere = context.global_num_rows or num_rows
    if kind == "sum":
        return sum_loss(loss)
    if means is None:
        return mean_loss(loss, num_rows, everywhere)
    if isinstance(loss, torch.Tensor) and means.is_global(loss):
        return global_loss(loss, means, joins_batches=joins_batches)
    if not means.means and is_pair(loss):
        return pair_loss(loss, context)
    if not means.means and isinstance(loss, torch.Tensor) and loss.ndim:
        return mean_loss(loss, num_rows, everywhere)
    raise InvalidArgumentError(
        "What a module's loss divides by must be known, because several replicas have the rows: the loss must be made "
        "of means by torch's loss functions (torch.nn.functional.cross_entropy, mse_loss, ...) and numbers alone, got "
        f"a loss with {len(means.means)} such means and something else in it. Let the module return one loss per row "
        'or (sum, denominator), or say what it is: compile(..., loss="model", loss_reduction="mean") for a mean over '
        'rows, "sum" for a sum over rows or a loss with a global denominator.'
    )
