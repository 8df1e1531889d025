"""The model_fn of canned estimators: linear models and dense layers over feature columns, whose logits are added up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, final

import torch
from torch import nn

from raydist.core.errors import InvalidArgumentError
from raydist.estimator.ftrl import Ftrl
from raydist.estimator.heads import Head, mean_of
from raydist.estimator.model_fn_module import get_or_create
from raydist.estimator.spec import EstimatorSpec, ModeKeys
from raydist.feature.columns import FeatureColumn
from raydist.feature.feature_space import FeatureSpace
from raydist.training.feature_layers import DenseFeatures, LinearModel

OptimizerChoice = str | Callable[[Any], torch.optim.Optimizer]
Reduction = Literal["sum_over_batch_size", "sum"]
Columns = Iterable[FeatureColumn]
Activation = Callable[[torch.Tensor], torch.Tensor]

WEIGHTS = "weights of rows"  # name of these among the features of a model
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "Adagrad": lambda parameters, lr: torch.optim.Adagrad(parameters, lr=lr, initial_accumulator_value=0.1),
    "Adam": torch.optim.Adam,
    "Ftrl": Ftrl,
    "RMSProp": torch.optim.RMSprop,
    "SGD": torch.optim.SGD,
}


@final
class DenseLayers(nn.Module):
    """Dense layers over feature columns; weights begin as Glorot and Bengio's uniform numbers, biases as zeros."""

    def __init__(
        self,
        units: int,
        columns: Sequence[FeatureColumn],
        hidden_units: Sequence[int],
        activation_fn: Activation,
        dropout: float | None,
    ) -> None:
        super().__init__()
        self.inputs = DenseFeatures(columns)
        sizes = [self.inputs.out_features, *hidden_units, units]
        layers = [nn.Linear(*pair) for pair in zip(sizes, sizes[1:], strict=False)]
        for layer in layers:
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.layers, self.dropout = nn.ModuleList(layers), nn.Dropout(dropout or 0.0)
        self._activation_fn = activation_fn

    def forward(self, features: Mapping[str, Any]) -> torch.Tensor:
        """Return the logits, (rows, units)."""
        *hidden, last = self.layers
        values = self.inputs(features).to(last.weight.dtype)
        for layer in hidden:
            values = self.dropout(self._activation_fn(layer(values)))
        logits: torch.Tensor = last(values)
        return logits


@final
@dataclass(frozen=True)
class Part:
    """A part of a canned model.

    Attributes:
        columns: The feature columns.
        make_module: Makes the module for a number of logits.
        optimizer: The name of an optimizer, or a function that makes one of the parameters.
        rate: Learning rate of an optimizer that is given by its name.
    """

    columns: tuple[FeatureColumn, ...]
    make_module: Callable[[int], nn.Module]
    optimizer: OptimizerChoice
    rate: float

    @classmethod
    def linear(cls, columns: Columns, optimizer: OptimizerChoice, combiner: str, most: float = 0.2) -> Part:
        """Return a linear part; its rate is TensorFlow's."""
        given = tuple(columns)
        rate = min(most, 1 / math.sqrt(max(1, len(given))))
        return cls(given, lambda units: LinearModel(given, units, combiner), optimizer, rate)

    @classmethod
    def dnn(
        cls, columns: Columns, optimizer: OptimizerChoice, hidden_units: Any, *settings: Any, rate: float = 0.05
    ) -> Part:
        """Return a part of dense layers."""
        if not hidden_units:
            raise InvalidArgumentError(f"hidden_units must be sizes of layers, as [64, 32], got {hidden_units!r}.")
        given = tuple(columns)
        return cls(given, lambda units: DenseLayers(units, given, hidden_units, *settings), optimizer, rate)

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer for the parameters of the part's module."""
        if callable(self.optimizer):
            return self.optimizer(module.parameters())
        if self.optimizer not in OPTIMIZERS:
            raise InvalidArgumentError(
                f"An optimizer must be one of {', '.join(OPTIMIZERS)}, or a function that makes one of parameters, "
                f"got {self.optimizer!r}."
            )
        return OPTIMIZERS[self.optimizer](module.parameters(), lr=self.rate)


@final
@dataclass(frozen=True)
class CannedModelFn:
    """The model_fn of a canned estimator: the logits of its parts are added up."""

    head: Head
    parts: Mapping[str, Part]
    loss_reduction: Reduction

    def __call__(self, features: Mapping[str, Any], labels: Any, mode: ModeKeys) -> EstimatorSpec:
        modules = {
            name: get_or_create(name, partial(part.make_module, self.head.num_logits))
            for name, part in self.parts.items()
        }
        logits = torch.stack([module(features) for module in modules.values()]).sum(0)
        if mode is ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions=self.head.predictions(logits))
        losses = self.head.losses(logits, labels)
        weights = features[WEIGHTS].reshape(-1).to(losses) if WEIGHTS in features else None
        loss = losses if weights is None else losses * weights
        reduction: Any = "sum" if self.loss_reduction == "sum" else None
        if mode is ModeKeys.EVAL:
            metrics = {"average_loss": mean_of("average_loss", losses, weights)}
            metrics |= self.head.metrics(logits, labels, weights)
            return EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics, loss_reduction=reduction)
        optimizers = [
            get_or_create(f"{name}_optimizer", partial(part.make_optimizer, modules[name]))
            for name, part in self.parts.items()
        ]
        return EstimatorSpec(mode, loss=loss, optimizer=optimizers, loss_reduction=reduction)


@final
@dataclass(frozen=True)
class Preparation:
    """A function for `Dataset.map`: features to columns, labels to numbers."""

    space: FeatureSpace
    head: Head
    weights: FeatureSpace | None
    predicts: bool

    def __call__(self, features: Mapping[str, Any], labels: Any = None) -> Any:
        found = self.space.transform(features, batched=True)
        if self.predicts:
            return found
        if self.weights is not None:
            (found[WEIGHTS],) = self.weights.transform(features, batched=True).values()
        return found, self.head.labels(labels)
