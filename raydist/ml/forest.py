"""Random forests: XGBoost's mode of parallel trees, trained on the workers of Ray Train."""

from __future__ import annotations

import functools
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, final

import numpy as np
import torch

from raydist.actors.xgboost_training import train_booster, xgboost
from raydist.core.errors import InvalidArgumentError
from raydist.dataset import Dataset
from raydist.ml.estimator import Classifier, Estimator, Probabilistic, Regressor, means, require_positive, seed_of
from raydist.ml.passes import State

MaxFeatures = str | float | None


def as_row(classes: tuple[float, ...], *element: Any) -> dict[str, Any]:
    """Return a row for Ray Data. With more than two classes targets are a vector with a 1 for the row's class."""
    x, y, *weight = element
    target = np.atleast_1d(np.asarray(y, dtype=np.float32))
    if classes:
        at = int(np.searchsorted(classes, y))
        target = np.eye(len(classes), dtype=np.float32)[at] if len(classes) > 2 else np.array([at], dtype=np.float32)
    return {
        "x": np.asarray(x, dtype=np.float32),
        "y": target,
        "weight": np.float32(weight[0] if weight else 1.0),
    }


@functools.lru_cache(maxsize=4)
def _loaded(model: bytes) -> Any:
    booster = xgboost().Booster()
    booster.load_model(bytearray(model))
    return booster


def tree_means(x: torch.Tensor, state: State) -> torch.Tensor:
    """Return the mean prediction of the trees: (n,), or (n, t) for several targets."""
    booster = _loaded(state["booster"].cpu().numpy().tobytes())
    found = booster.inplace_predict(x.cpu().numpy().astype(np.float32))
    return torch.as_tensor(found, dtype=torch.float64, device=x.device)


def class_shares(x: torch.Tensor, state: State) -> torch.Tensor:
    """Return the probability of each class."""
    shares = tree_means(x, state).clamp(0, 1)
    if shares.ndim == 1:
        return torch.stack([1 - shares, shares], dim=1)
    return shares / shares.sum(dim=1, keepdim=True).clamp(min=1e-12)


@dataclass(eq=False)
class Forest(Estimator):
    """The base class of random forests by XGBoost, on the workers of Ray Train. `pip install 'raydist[xgboost]'`.

    Trees find their splits in histograms of 256 bins, and draw rows without replacement. The workers hold the rows, in
    float32. A `strategy` serves for the predictions of datasets alone.

    Args:
        n_estimators: The number of trees.
        max_depth: Limit of the depth; None for no limit.
        max_features: Features that are tried at each split: "sqrt", "log2", a share, or None for all.
        max_samples: Share of the rows that each tree sees.
        min_samples_leaf: Least weight of the rows of a leaf.
        random_state: Seed; None for a new one.
        num_workers: Processes of Ray Train, of one CPU each.
        storage_path: Where Ray Train keeps its records; a folder that all nodes share, if there are several.
    """

    n_estimators: int = 100
    _: KW_ONLY
    max_depth: int | None = None
    max_features: MaxFeatures = None
    max_samples: float = 0.632
    min_samples_leaf: int = 1
    random_state: int | None = None
    num_workers: int = 1
    storage_path: str | None = None
    _fitted = "_model"

    def _fit(self, data: Dataset) -> bool:
        xgboost()  # or an error, before anything is read
        reader, classes = self._reader(data), ()
        if isinstance(self, Classifier):
            classes = tuple(self._find_classes(reader)["classes"].tolist())
        self.n_features_in_ = len(reader.fold(means)["x"])
        rows = data.unbatch().map(functools.partial(as_row, classes)).to_ray()
        workers = require_positive("num_workers", self.num_workers)
        self._model: bytes = train_booster(rows, self._params(len(classes)), workers, self.storage_path)
        return True

    def _params(self, num_classes: int) -> dict[str, Any]:
        """Return XGBoost's parameters for trees whose leaves are means of targets.

        Targets of classes are 0 and 1: means are then shares of classes, and squared errors are Gini's impurity.
        """
        if not 0 < self.max_samples <= 1:
            raise InvalidArgumentError(f"max_samples must be in (0, 1], got {self.max_samples!r}.")
        return {
            "objective": "reg:squarederror",
            "num_parallel_tree": require_positive("n_estimators", self.n_estimators),
            "tree_method": "hist",
            "multi_strategy": "multi_output_tree" if num_classes > 2 else "one_output_per_tree",
            "eta": 1.0,
            "lambda": 0.0,
            "max_depth": 0 if self.max_depth is None else require_positive("max_depth", self.max_depth),
            "subsample": self.max_samples,
            "colsample_bynode": self._share_of_features(),
            "min_child_weight": require_positive("min_samples_leaf", self.min_samples_leaf),
            "seed": seed_of(self.random_state),
            "nthread": 1,
        }

    def _share_of_features(self) -> float:
        given, d = self.max_features, self.n_features_in_
        share = {"sqrt": d**-0.5, "log2": np.log2(max(d, 2)) / d, None: 1.0}.get(given, given)  # type: ignore[arg-type]
        if not isinstance(share, float) or not 0 < share <= 1:
            raise InvalidArgumentError(
                f'max_features must be "sqrt", "log2", None or a share in (0, 1], got {given!r}.'
            )
        return float(share)

    def _state(self) -> State:
        return {"booster": torch.frombuffer(bytearray(self._model), dtype=torch.uint8)}


@final
@dataclass(eq=False)
class RandomForestClassifier(Forest, Classifier, Probabilistic):
    """A random forest whose leaves hold the shares of the classes; probabilities are means over the trees.

    Source: sklearn.ensemble.RandomForestClassifier, xgboost.XGBRFClassifier, ray.train.xgboost.XGBoostTrainer.

    Example::

        model = rd.ml.RandomForestClassifier(200, num_workers=4).fit(dataset)
    """

    max_features: MaxFeatures = field(default="sqrt", kw_only=True)

    _probabilities = staticmethod(class_shares)

    @staticmethod
    def _predicted(x: torch.Tensor, state: State) -> torch.Tensor:
        return class_shares(x, state).argmax(dim=1)


@final
@dataclass(eq=False)
class RandomForestRegressor(Forest, Regressor):
    """A random forest whose leaves hold means of the targets.

    Source: sklearn.ensemble.RandomForestRegressor, xgboost.XGBRFRegressor, ray.train.xgboost.XGBoostTrainer.

    Example::

        model = rd.ml.RandomForestRegressor(200, num_workers=4).fit(dataset)
    """

    _predicted = staticmethod(tree_means)
