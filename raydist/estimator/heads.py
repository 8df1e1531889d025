"""Heads of canned estimators: losses, predictions and metrics of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch.nn import functional as F

from raydist.core.errors import InvalidArgumentError
from raydist.estimator.model_fn_module import get_or_create
from raydist.training.metrics import Mean

_THRESHOLDS = 200  # of areas under curves, as in TensorFlow


def mean_of(name: str, values: torch.Tensor, weights: torch.Tensor | None) -> tuple[Any, ...]:
    """Return a metric that is the weighted mean of rows, with its arguments."""
    return get_or_create(name, Mean), values, torch.ones(()) if weights is None else weights


@final
@dataclass(frozen=True)
class RegressionHead:
    """Numbers, by the mean squared error over the numbers of a row."""

    label_dimension: int = 1

    @property
    def num_logits(self) -> int:
        return self.label_dimension

    def labels(self, given: Any) -> np.ndarray[Any, Any]:
        values = np.asarray(given)
        if values.size != len(values) * self.label_dimension:
            raise InvalidArgumentError(f"Labels must be (rows, {self.label_dimension}), got shape {values.shape}.")
        return values.reshape(len(values), self.label_dimension)

    def losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (logits - labels).square().mean(1)

    def predictions(self, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"predictions": logits}

    def metrics(self, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None) -> dict[str, Any]:
        values = {"prediction/mean": logits, "label/mean": labels.to(logits)}
        return {name: mean_of(name, value.mean(1), weights) for name, value in values.items()}


@final
@dataclass(frozen=True)
class ClassHead:
    """Classes: two by the sigmoid of one logit, more by a softmax."""

    n_classes: int
    label_vocabulary: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        if self.n_classes < 2:
            raise InvalidArgumentError(f"n_classes must be >= 2, got {self.n_classes!r}.")
        if self.label_vocabulary is not None and len(self.label_vocabulary) != self.n_classes:
            raise InvalidArgumentError(
                f"label_vocabulary must have {self.n_classes} labels, got {len(self.label_vocabulary)}."
            )

    @property
    def num_logits(self) -> int:
        return 1 if self.n_classes == 2 else self.n_classes

    def labels(self, given: Any) -> np.ndarray[Any, Any]:
        values = np.asarray(given)
        if values.size != len(values):
            raise InvalidArgumentError(f"Labels must be (rows,) or (rows, 1), got shape {values.shape}.")
        known = range(self.n_classes) if self.label_vocabulary is None else map(_text, self.label_vocabulary)
        numbers = {label: number for number, label in enumerate(known)}
        found = [numbers.get(_text(label), -1) for label in values.reshape(-1).tolist()]
        if -1 in found:
            label = values.reshape(-1).tolist()[found.index(-1)]
            raise InvalidArgumentError(f"Labels must be among {list(numbers)!s:.200}, got {label!r}.")
        return np.array(found, dtype=np.int64)

    def losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.n_classes == 2:
            return F.binary_cross_entropy_with_logits(logits[:, 0], labels.to(logits), reduction="none")
        return F.cross_entropy(logits, labels, reduction="none")

    def predictions(self, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.n_classes == 2:
            chance = logits.sigmoid()
            found = {"logits": logits, "logistic": chance, "probabilities": torch.cat([1 - chance, chance], 1)}
        else:
            found = {"logits": logits, "probabilities": logits.softmax(1)}
        return {**found, "class_ids": self._classes(logits).unsqueeze(1)}

    def named_classes(self, class_ids: torch.Tensor) -> np.ndarray[Any, Any]:
        """Return the labels of classes, as an array of objects; without a vocabulary the numbers as text."""
        names = map(str, range(self.n_classes)) if self.label_vocabulary is None else self.label_vocabulary
        found: np.ndarray[Any, Any] = np.array(list(names), dtype=object)[class_ids.numpy()]
        return found

    def metrics(self, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None) -> dict[str, Any]:
        classes = self._classes(logits)
        found = {"accuracy": mean_of("accuracy", (classes == labels).to(logits), weights)}
        if self.n_classes > 2:
            return found
        chance, right = logits[:, 0].sigmoid(), (classes * labels).to(logits)
        of_rows = torch.ones_like(chance) if weights is None else weights
        found |= {
            "prediction/mean": mean_of("prediction/mean", chance, weights),
            "label/mean": mean_of("label/mean", labels.to(logits), weights),
            "precision": mean_of("precision", right, of_rows * classes),
            "recall": mean_of("recall", right, of_rows * labels),
        }
        if weights is None:  # torchmetrics' curves take no weights
            from torchmetrics.classification import BinaryAUROC

            found["auc"] = get_or_create("auc", lambda: BinaryAUROC(thresholds=_THRESHOLDS)), chance, labels
        return found

    def _classes(self, logits: torch.Tensor) -> torch.Tensor:
        return (logits[:, 0] > 0).long() if self.n_classes == 2 else logits.argmax(1)


Head = ClassHead | RegressionHead


def _text(label: Any) -> Any:
    return label.decode() if isinstance(label, bytes) else label
