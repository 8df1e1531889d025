"""Linear classifiers: L-BFGS on sums of losses and gradients over all rows."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch.nn import functional

from raydist.core.errors import InvalidArgumentError
from raydist.dataset import Dataset
from raydist.ml.estimator import Classifier, moments, require_positive
from raydist.ml.passes import Reader, Rows, State, Totals

MAX_NEWTON = 2000
"""Coefficients up to which Newton's method is used: its matrix of second derivatives takes 32 MB then."""


def scores_of(x: torch.Tensor, state: State) -> torch.Tensor:
    """Return x W^T + b: (n, classes), or (n, 1) for two classes."""
    return x @ state["coef"].T + state["intercept"]


def codes_of(rows: Rows, state: State) -> torch.Tensor:
    """Return the number of the class of each row."""
    return torch.searchsorted(state["classes"], rows.targets.reshape(-1).contiguous())


def signs_of(codes: torch.Tensor, num_scores: int) -> torch.Tensor:
    """Return +1 for a row's class and -1 for others: (n, num_scores), where one score stands for class 1.

    >>> signs_of(torch.tensor([0, 1]), 1).tolist(), signs_of(torch.tensor([0, 1]), 3).tolist()
    ([[-1.0], [1.0]], [[1.0, -1.0, -1.0], [-1.0, 1.0, -1.0]])
    """
    one_hot = codes[:, None] if num_scores == 1 else functional.one_hot(codes, num_scores)
    return 2.0 * one_hot.to(torch.float64) - 1.0


@final
@dataclass(frozen=True, slots=True)
class Terms:
    """Losses of rows (n,), and their derivatives with respect to the k scores of a row.

    `second` is (n, k, k), or (n, k) if the scores have nothing to do with each other.
    """

    losses: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor


def cross_entropy(scores: torch.Tensor, codes: torch.Tensor) -> Terms:
    """Return the terms of the cross entropy of classes `codes` (n,).

    >>> cross_entropy(torch.zeros(1, 1), torch.tensor([1])).first
    tensor([[-0.5000]])
    """
    if scores.shape[1] == 1:
        target = codes.to(scores.dtype)[:, None]
        p = scores.sigmoid()
        return Terms((functional.softplus(scores) - target * scores)[:, 0], p - target, p * (1 - p))
    losses = functional.cross_entropy(scores, codes, reduction="none")
    p = scores.softmax(dim=1)
    second = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return Terms(losses, p - functional.one_hot(codes, scores.shape[1]), second)


def squared_hinge(scores: torch.Tensor, codes: torch.Tensor) -> Terms:
    """Return the terms of max(0, 1 - sign * score)^2, added up over the scores of a row.

    >>> squared_hinge(torch.zeros(1, 1), torch.tensor([1])).first
    tensor([[-2.]])
    """
    signs = signs_of(codes, scores.shape[1]).to(scores.dtype)
    margins = (1 - signs * scores).clamp(min=0)
    return Terms(margins.square().sum(dim=1), -2 * signs * margins, 2.0 * (margins > 0))


def scaled_columns(rows: Rows, state: State) -> torch.Tensor:
    """Return the scaled inputs, and a column of ones (zeros without intercept)."""
    scaled = (rows.x - state["mean"]) / state["scale"]
    return torch.cat([scaled, state["one"].expand(len(scaled), 1)], dim=1)


def gradient_sums(terms_of: Callable[..., Terms], rows: Rows, state: State) -> Totals:
    """Return the sums of loss and gradient (k, d + 1) at `point`."""
    columns = scaled_columns(rows, state)
    terms = terms_of(columns @ state["point"].T, codes_of(rows, state))
    return {"loss": rows.weight @ terms.losses, "gradient": (terms.first * rows.weight[:, None]).T @ columns}


def newton_sums(terms_of: Callable[..., Terms], rows: Rows, state: State) -> Totals:
    """Return the sums of loss, gradient, and second derivatives: (k, k, d + 1, d + 1), or (k, d + 1, d + 1)."""
    columns = scaled_columns(rows, state)
    terms = terms_of(columns @ state["point"].T, codes_of(rows, state))
    weight = rows.weight[:, None]
    second = terms.second.flatten(1) * weight
    blocks = torch.stack([columns.T @ (columns * part[:, None]) for part in second.T])
    return {
        "loss": rows.weight @ terms.losses,
        "gradient": (terms.first * weight).T @ columns,
        "second": blocks.reshape(*terms.second.shape[1:], *blocks.shape[1:]),
    }


class LinearClassifier(Classifier):
    """The base class of linear classifiers.

    Attributes:
        coef_: Coefficients (classes, d), or (1, d) for two classes.
        intercept_: (classes,), or (1,) for two classes.
        n_iter_: The number of iterations, [k].
    """

    coef_: np.ndarray  # fields of dataclasses are those of constructors: this class is none
    intercept_: np.ndarray
    n_iter_: np.ndarray

    def _state(self) -> State:
        return {"coef": torch.as_tensor(self.coef_), "intercept": torch.as_tensor(self.intercept_)}

    @staticmethod
    def _predicted(x: torch.Tensor, state: State) -> torch.Tensor:
        scores = scores_of(x, state)
        return (scores[:, 0] > 0).long() if scores.shape[1] == 1 else scores.argmax(dim=1)

    def decision_function(self, X: Any) -> np.ndarray:
        """Return the scores of each row, (n, classes); for two classes those of the second one, (n,). Blocks.

        Args:
            X: Rows: an array (n, d), or a dataset.

        Raises:
            FailedPreconditionError: The estimator is not fitted.

        >>> bool(rd.ml.LinearSVC().fit([[0.0], [1.0]], [0, 1]).decision_function([[2.0]])[0] > 0)
        True
        """
        scores = self._outputs(X, scores_of)
        return scores[:, 0] if scores.shape[1] == 1 else scores


@dataclass(eq=False, repr=False)
class ConvexClassifier(LinearClassifier):
    """The base class of classifiers that minimise C * sum of losses + an L2 penalty / 2.

    Up to 2,000 coefficients are found by Newton's method, which needs few passes and a matrix of their squared number;
    more of them by L-BFGS.

    Args:
        C: Weight of the losses against the penalty; math.inf for no penalty.
        tol: Distance of the objective from its minimum, relative to the objective, as estimated by Newton's method.
            Beyond 2,000 coefficients: 100 times the limit of the derivatives of the mean loss.
        max_iter: Limit of the number of iterations.
        fit_intercept: False for intercepts of 0.
    """

    C: float = 1.0
    _: KW_ONLY
    tol: float = 1e-4
    max_iter: int = 100
    fit_intercept: bool = True
    _terms: ClassVar[Callable[..., Terms]]
    _curvature: ClassVar[float]  # second derivative of a loss, at most
    _penalised_intercept: ClassVar[bool] = False

    def _fit(self, data: Dataset) -> None:
        require_positive("max_iter", self.max_iter)
        if not self.C > 0:
            raise InvalidArgumentError(f"C must be a number > 0, got {self.C!r}.")
        reader = self._reader(data)
        state = self._find_classes(reader)
        mean, variance, weight, _ = moments(reader)
        self.n_features_in_ = len(mean)
        search = _Search(self, reader, state, mean, variance, weight)
        coef, intercept = search.minimum(1 if len(self.classes_) == 2 else len(self.classes_))
        self.coef_, self.intercept_ = coef.numpy(), intercept.numpy()
        self.n_iter_ = np.array([search.num_iterations])


@final
class _Search:
    """The search for the coefficients of scaled inputs and the intercept, `point` (k, d + 1), which needs few steps.

    The objective is that of the coefficients of the inputs themselves, divided by C times the sum of the weights.
    """

    def __init__(
        self,
        model: ConvexClassifier,
        reader: Reader,
        state: State,
        mean: torch.Tensor,
        variance: torch.Tensor,
        weight: float,
    ) -> None:
        self._model = model
        self._reader = reader
        self._weight = weight
        one = torch.tensor(float(model.fit_intercept), dtype=torch.float64)
        # The root of the second derivatives with respect to the coefficients, at most, but for a factor.
        curvature = variance + 1 / (model.C * weight * model._curvature)
        scale = torch.where(curvature > 0, curvature, torch.ones_like(curvature)).sqrt()
        self._state = {**state, "mean": one * mean, "scale": scale, "one": one}
        # A row of `point` times this matrix: coefficients of the inputs themselves, and their intercept.
        self._unscaled = torch.diag(torch.cat([1 / scale, one[None]]))
        self._unscaled[:-1, -1] = -one * mean / scale
        weights = torch.ones(len(mean) + 1, dtype=torch.float64)
        weights[-1] = float(model._penalised_intercept)
        self._penalty = (self._unscaled * weights) @ self._unscaled.T / (model.C * weight)
        self.num_iterations = 0

    def minimum(self, num_scores: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return coefficients and intercepts. Warns if `max_iter` was too small."""
        point = torch.zeros(num_scores, len(self._unscaled), dtype=torch.float64)
        point, converged = (self._newton if point.numel() <= MAX_NEWTON else self._lbfgs)(point)
        if not converged:
            warnings.warn(
                f"{type(self._model).__name__} did not converge in {self._model.max_iter} iterations. Raise max_iter.",
                stacklevel=5,
            )
        found = point @ self._unscaled
        return found[:, :-1].contiguous(), found[:, -1].contiguous()

    def _sums(self, of: Callable[..., Totals], point: torch.Tensor) -> tuple[float, torch.Tensor, Totals]:
        """Return the objective at `point`, its gradient, and the sums of `of`."""
        sums = self._reader.fold(of, {**self._state, "point": point})
        slope = point @ self._penalty
        value = float(sums["loss"]) / self._weight + 0.5 * float((slope * point).sum())
        return value, sums["gradient"] / self._weight + slope, sums

    def _newton(self, point: torch.Tensor) -> tuple[torch.Tensor, bool]:
        of = functools.partial(newton_sums, self._model._terms)
        value, gradient, sums = self._sums(of, point)
        while self.num_iterations < self._model.max_iter:
            self.num_iterations += 1
            step = self._newton_step(gradient, sums["second"])
            decrease = -float((gradient * step).sum())
            if decrease / 2 <= self._model.tol * value:
                return point + step, True  # the step leaves much less than the distance that `decrease` estimates
            share = 1.0
            while share > 1e-10:
                trial, slope, new = self._sums(of, point + share * step)
                if trial <= value - 1e-4 * share * decrease:
                    break
                share /= 2
            point, value, gradient, sums = point + share * step, trial, slope, new
        return point, False

    def _newton_step(self, gradient: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        k, p = gradient.shape
        second = second / self._weight
        if second.ndim == 3:  # one matrix for each row of `point`
            matrices, right = second + self._penalty, gradient[:, :, None]
        else:
            joint = second.permute(0, 2, 1, 3).reshape(k * p, k * p)
            matrices = (joint + torch.block_diag(*[self._penalty] * k))[None]
            right = gradient.reshape(1, k * p, 1)
        # Where the objective does not change (the same intercept for all classes, say), the step is 0.
        ridge = 1e-12 * matrices.diagonal(dim1=1, dim2=2).mean() * torch.eye(matrices.shape[1], dtype=torch.float64)
        step: torch.Tensor = -torch.linalg.solve(matrices + ridge, right)
        return step.reshape(k, p)

    def _lbfgs(self, point: torch.Tensor) -> tuple[torch.Tensor, bool]:
        of = functools.partial(gradient_sums, self._model._terms)
        point.requires_grad_()
        limit = self._model.max_iter
        search = torch.optim.LBFGS(
            [point],
            max_iter=limit,
            max_eval=max(25, 2 * limit),
            tolerance_grad=self._model.tol * 1e-2,
            tolerance_change=1e-14,
            line_search_fn="strong_wolfe",
        )

        def evaluate() -> float:
            value, point.grad, _ = self._sums(of, point.detach())
            return value

        search.step(evaluate)
        self.num_iterations = search.state[point]["n_iter"]
        return point.detach(), self.num_iterations < limit


@final
@dataclass(eq=False, repr=False)
class LogisticRegression(ConvexClassifier):
    """Logistic regression; multinomial for more than two classes.

    Minimises C * sum of cross entropies + ||w||^2 / 2, scikit-learn's objective.

    Source: sklearn.linear_model.LogisticRegression.

    >>> model = LogisticRegression().fit([[0.0], [1.0], [4.0]], [0, 0, 1])
    >>> model.predict([[0.5], [5.0]]).tolist()
    [0, 1]
    """

    _terms = staticmethod(cross_entropy)
    _curvature = 0.25

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class, (n, classes). Blocks.

        Args:
            X: Rows: an array (n, d), or a dataset.

        Raises:
            FailedPreconditionError: The estimator is not fitted.

        >>> LogisticRegression().fit([[0.0], [1.0]], [0, 1]).predict_proba([[0.5]]).round(6).tolist()
        [[0.5, 0.5]]
        """
        return self._outputs(X, probabilities)


def probabilities(x: torch.Tensor, state: State) -> torch.Tensor:
    """Return the probability of each class.

    >>> probabilities(torch.zeros(1, 1), {"coef": torch.ones(1, 1), "intercept": torch.zeros(1)})
    tensor([[0.5000, 0.5000]])
    """
    scores = scores_of(x, state)
    if scores.shape[1] > 1:
        return scores.softmax(dim=1)
    return torch.cat([(-scores).sigmoid(), scores.sigmoid()], dim=1)


@final
@dataclass(eq=False, repr=False)
class LinearSVC(ConvexClassifier):
    """A linear support vector machine with the squared hinge loss, one against the rest.

    Minimises C * sum of max(0, 1 - score)^2 + (||w||^2 + b^2) / 2, as scikit-learn's class of this name does: the
    intercept is penalised, too.

    Source: sklearn.svm.LinearSVC.

    >>> LinearSVC().fit([[0.0], [1.0], [4.0]], [0, 0, 1]).predict([[0.5], [5.0]]).tolist()
    [0, 1]
    """

    max_iter: int = field(default=1000, kw_only=True)
    _penalised_intercept = True

    _terms = staticmethod(squared_hinge)
    _curvature = 2.0
