"""The base classes of estimators: parameters, data, scores, as in scikit-learn."""

from __future__ import annotations

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch

from raydist.context.strategy import Strategy
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError, SpecError
from raydist.dataset import Dataset
from raydist.ml.passes import Reader, Rows, State, Totals, array_of, batches_of, is_dataset, strategy_of
from raydist.strategies.one_device import OneDeviceStrategy


@dataclass(eq=False)
class Estimator(ABC):
    """A model with scikit-learn's interface. Parameters are attributes; `fit` sets attributes that end with "_".

    Args:
        strategy: The strategy whose replicas read the data; None for that of the open scope, else this process.
        batch_size: Rows of a batch, for arrays and for datasets that are not batched.

    Attributes:
        n_features_in_: The number of features d.
    """

    strategy: Strategy | None = field(default=None, kw_only=True)
    batch_size: int = field(default=1024, kw_only=True)
    n_features_in_: int = field(init=False, repr=False)
    _kind: ClassVar[str | None] = None  # scikit-learn's name of the kind: "classifier", "regressor", "clusterer"
    _fitted: ClassVar[str] = "coef_"  # an attribute that `fit` sets

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Fit the model and return it. Blocks. Warns if `max_iter` iterations were too few.

        Args:
            X: Rows: an array (n, d), or a dataset or torch DataLoader of rows or batches: x, (x, y) or (x, y,
                sample_weight).
            y: Targets (n,) of an array, (n, t) for linear regression. Classes of arrays may be strings; those of
                datasets are numbers. Models without targets ignore them.
            sample_weight: Weights of the rows of an array.

        Raises:
            SpecError: The data have another form.
            InvalidArgumentError: The data are infinite, empty, or hold values that are not finite; or a parameter is
                invalid.
            FailedPreconditionError: A package that is needed is not installed.

        >>> rd.ml.LinearRegression().fit([[0.0], [1.0]], [1.0, 3.0]).coef_.round(6).tolist()
        [2.0]
        """
        if not self._fit(self._batches(X, self._encoded(X, y), sample_weight)):
            warnings.warn(
                f"{type(self).__name__} did not converge in {self.get_params()['max_iter']} iterations. Raise max_iter "
                "or tol.",
                stacklevel=2,
            )
        return self

    @abstractmethod
    def _fit(self, data: Dataset) -> bool:
        """Fit the model to batches; return False if `max_iter` iterations were too few."""

    def predict(self, X: Any) -> np.ndarray:
        """Return the prediction for each row: a number, a class, or the number of a cluster. Blocks.

        Args:
            X: Rows: an array (n, d), or a dataset.

        Returns:
            An array (n,), or (n, t) if targets were (n, t).

        Raises:
            FailedPreconditionError: The model is not fitted.

        >>> rd.ml.LogisticRegression().fit([[0.0], [1.0]], ["no", "yes"]).predict([[2.0]]).tolist()
        ['yes']
        """
        return self._outputs(X, type(self)._predicted)

    @staticmethod
    @abstractmethod
    def _predicted(x: torch.Tensor, state: State) -> torch.Tensor:
        """Return the predictions for inputs (n, d): numbers, or those of classes or clusters."""

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Return how good the model is: larger is better. Blocks.

        It is R^2 for regressors, the share of right classes for classifiers, minus the sum of squared distances for
        `KMeans`, and the mean log likelihood for `GaussianMixture`.

        Args:
            X: Rows: an array (n, d), or a dataset, with targets if the model has them.
            y: Targets of an array.
            sample_weight: Weights of the rows of an array.

        Raises:
            FailedPreconditionError: The model is not fitted.

        >>> rd.ml.LinearRegression().fit([[0.0], [1.0]], [1.0, 3.0]).score([[2.0], [3.0]], [5.0, 7.0])
        1.0
        """
        self._require_fitted()
        data = self._batches(X, self._encoded(X, y, known=True), sample_weight)
        strategy = strategy_of(self.strategy) if is_dataset(X) else OneDeviceStrategy("cpu")
        return self._score(Reader(strategy, data))

    @abstractmethod
    def _score(self, reader: Reader) -> float:
        """Return the score of the rows."""

    def _encoded(self, x: Any, y: Any, *, known: bool = False) -> Any:
        """Return the targets of an array as numbers; `known` says that their classes are `classes_`."""
        return y

    def _batches(self, x: Any, y: Any = None, sample_weight: Any = None, *, supervised: bool = True) -> Dataset:
        """Return the batches of the data arguments; targets are needed if the model has them."""
        has_targets = self._kind in ("classifier", "regressor")
        return batches_of(
            x,
            y if has_targets else None,
            sample_weight,
            batch_size=require_positive("batch_size", self.batch_size),
            supervised=supervised and has_targets,
        )

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters of the constructor by name.

        Args:
            deep: Has no effect, because no parameter is an estimator.

        >>> rd.ml.Ridge(alpha=2.0).get_params()["alpha"]
        2.0
        """
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **params: Any) -> Self:
        """Set parameters of the constructor and return the estimator.

        Args:
            **params: Values by name.

        Raises:
            InvalidArgumentError: There is no such parameter.

        >>> rd.ml.Ridge().set_params(alpha=2.0).alpha
        2.0
        """
        known = self.get_params()
        for name, value in params.items():
            if name not in known:
                raise InvalidArgumentError(
                    f"Parameters of {type(self).__name__} must be among {sorted(known)}, got {name!r}."
                )
            setattr(self, name, value)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "strategy": None}  # a strategy belongs to its process

    def __sklearn_clone__(self) -> Self:
        return type(self)(**self.get_params())

    def __sklearn_tags__(self) -> Any:
        """Return the tags that scikit-learn asks estimators for in its pipelines and searches."""
        from sklearn.utils import ClassifierTags, RegressorTags, Tags, TargetTags

        return Tags(
            estimator_type=self._kind,
            target_tags=TargetTags(required=self._kind in ("classifier", "regressor")),
            classifier_tags=ClassifierTags() if self._kind == "classifier" else None,
            regressor_tags=RegressorTags() if self._kind == "regressor" else None,
        )

    @abstractmethod
    def _state(self) -> State:
        """Return the fitted model; read only after `_require_fitted`."""

    def _require_fitted(self) -> None:
        if not hasattr(self, self._fitted):
            raise FailedPreconditionError(f"This {type(self).__name__} must be fitted first: call fit.")

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, self._fitted)

    def _reader(self, data: Dataset) -> Reader:
        return Reader(strategy_of(self.strategy), data)

    def _outputs(self, x: Any, of: Callable[[torch.Tensor, State], torch.Tensor]) -> np.ndarray:
        """Return `of(x, state)` for all rows: of a dataset on the strategy, of an array in this process."""
        self._require_fitted()
        if is_dataset(x):
            return self._reader(self._batches(x, supervised=False)).outputs(of, self._state()).numpy()
        rows = array_of(x, "X", 2)
        if rows.shape[1] != self.n_features_in_:
            raise InvalidArgumentError(f"X must have {self.n_features_in_} features, got the shape {rows.shape}.")
        return of(torch.as_tensor(rows, dtype=torch.float64), self._state()).numpy()


def require_positive(name: str, value: int) -> int:
    """Return `value`; raise InvalidArgumentError unless it is an integer >= 1."""
    if not isinstance(value, int | np.integer) or value < 1:
        raise InvalidArgumentError(f"{name} must be an integer >= 1, got {value!r}.")
    return int(value)


def require_number(name: str, value: float, *, above_zero: bool = False) -> float:
    """Return `value`; raise InvalidArgumentError unless it is a number >= 0, or > 0."""
    if not isinstance(value, int | float | np.number) or not (value > 0 if above_zero else value >= 0):
        raise InvalidArgumentError(f"{name} must be a number {'>' if above_zero else '>='} 0, got {value!r}.")
    return value


def initial_values(given: Any, num_rows: int, num_columns: int) -> torch.Tensor:
    """Return initial values as float64; raise InvalidArgumentError unless they have this shape."""
    array = array_of(given, "An initial value", 2).astype(np.float64)
    if array.shape != (num_rows, num_columns):
        raise InvalidArgumentError(
            f"Initial values must have the shape {(num_rows, num_columns)}, got {array.shape}: a row for each cluster, "
            "component or column."
        )
    return torch.as_tensor(array)


def seed_of(random_state: int | None) -> int:
    """Return the seed, or a new one for None."""
    if random_state is None:
        return int(np.random.default_rng().integers(2**31))
    if not isinstance(random_state, int | np.integer) or random_state < 0:
        raise InvalidArgumentError(f"random_state must be an integer >= 0 or None, got {random_state!r}.")
    return int(random_state)


def as_columns(y: torch.Tensor) -> torch.Tensor:
    """Return targets as (n, t)."""
    return y[:, None] if y.ndim == 1 else y


def means(rows: Rows, _: State) -> Totals:
    """Return sums of weights, inputs and, if there are any, targets."""
    totals = {"n": rows.weight.sum(), "rows": torch.tensor(float(len(rows.x))), "x": rows.weight @ rows.x}
    return totals if rows.y is None else {**totals, "y": rows.weight @ rows.y}


def squares(rows: Rows, state: State) -> Totals:
    """Return sums of squared distances from the mean of each feature."""
    return {"squares": rows.weight @ (rows.x - state["mean"]) ** 2}


def moments(reader: Reader) -> tuple[torch.Tensor, torch.Tensor, float, int]:
    """Return mean and variance of each feature, the sum of the weights, and the number of rows, in two passes."""
    sums = reader.fold(means)
    mean = sums["x"] / sums["n"]
    spread = reader.fold(squares, {"mean": mean})["squares"]
    return mean, spread / sums["n"], float(sums["n"]), int(sums["rows"])


class Probabilistic(Estimator):
    """An estimator that knows the probability of each class or component."""

    _probabilities: ClassVar[Callable[..., torch.Tensor]]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class, or component, (n, k). Blocks.

        Args:
            X: Rows: an array (n, d), or a dataset.

        Raises:
            FailedPreconditionError: The estimator is not fitted.

        >>> rd.ml.LogisticRegression().fit([[0.0], [1.0]], [0, 1]).predict_proba([[0.5]]).round(6).tolist()
        [[0.5, 0.5]]
        """
        return self._outputs(X, type(self)._probabilities)


class Regressor(Estimator):
    """An estimator that predicts numbers."""

    _kind = "regressor"

    def _score(self, reader: Reader) -> float:
        sums = reader.fold(means)
        errors = reader.fold(type(self)._errors, {**self._state(), "y_mean": sums["y"] / sums["n"]})
        return float((1 - errors["residual"] / errors["total"]).mean())

    @classmethod
    def _errors(cls, rows: Rows, state: State) -> Totals:
        """Return the squared errors of predictions and of the mean."""
        y, predicted = as_columns(rows.targets), as_columns(cls._predicted(rows.x, state))
        return {
            "residual": rows.weight @ (y - predicted) ** 2,
            "total": rows.weight @ (y - state["y_mean"]) ** 2,
        }


class Classifier(Estimator):
    """An estimator that predicts classes.

    Attributes:
        classes_: The classes, in order.
    """

    _kind = "classifier"
    _named: np.ndarray | None  # classes of an array, whose numbers are then the targets

    def _encoded(self, x: Any, y: Any, *, known: bool = False) -> Any:
        if is_dataset(x) or y is None:
            named = None
        elif known:
            named = self.classes_
            numbers = {value: number for number, value in enumerate(named.tolist())}
            y = np.array([numbers.get(value, -1) for value in np.ravel(y).tolist()])
        else:
            named, y = np.unique(np.ravel(y), return_inverse=True)
        self._named = named
        return y

    def _find_classes(self, reader: Reader) -> State:
        """Set `classes_`; return the state in which the targets of the classes are found."""
        targets = reader.fold(unique_targets, merge=joined_targets)["y"]
        whole = bool((targets == targets.round()).all())
        numbers = targets.numpy().astype(np.int64 if whole else np.float64)
        self.classes_: np.ndarray = numbers if self._named is None else self._named
        if len(self.classes_) < 2:
            raise InvalidArgumentError(f"Targets must have at least two classes, got {self.classes_.tolist()}.")
        return {"classes": targets}

    def predict(self, X: Any) -> np.ndarray:
        codes = super().predict(X)
        return np.asarray(self.classes_[codes])

    def _score(self, reader: Reader) -> float:
        values = self.classes_ if self._named is None else np.arange(len(self.classes_))
        if values.dtype.kind not in "biuf":
            raise SpecError(f"Classes must be numbers as in a dataset, got {self.classes_!r:.100}. Give score arrays.")
        state = {**self._state(), "classes": torch.as_tensor(values.astype(np.float64))}
        sums = reader.fold(type(self)._hits, state)
        return float(sums["hits"] / sums["n"])

    @classmethod
    def _hits(cls, rows: Rows, state: State) -> Totals:
        right = state["classes"][cls._predicted(rows.x, state)] == rows.targets.reshape(-1)
        return {"hits": rows.weight @ right.to(torch.float64), "n": rows.weight.sum()}


def unique_targets(rows: Rows, _: State) -> Totals:
    """Return the targets of a batch, each once."""
    return {"y": rows.targets.unique()}


def joined_targets(a: Totals, b: Totals) -> Totals:
    """Return the targets of both, each once."""
    return {"y": torch.cat([a["y"], b["y"]]).unique()}
