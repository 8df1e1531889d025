"""Linear classifiers: Newton's method, or L-BFGS, on sums of losses and derivatives over all rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch.nn import functional

from raydist.dataset import Dataset
from raydist.ml.estimator import Classifier, Probabilistic, moments, require_number, require_positive
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


def cross_entropy(scores: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each row (n,) for classes `codes` (n,).

    >>> cross_entropy(torch.zeros(1, 1), torch.tensor([1]))
    tensor([0.6931])
    """
    if scores.shape[1] > 1:
        return functional.cross_entropy(scores, codes, reduction="none")
    return functional.softplus(scores[:, 0]) - codes * scores[:, 0]


def hinge(scores: torch.Tensor, codes: torch.Tensor, power: int = 2) -> torch.Tensor:
    """Return the sum of max(0, 1 - sign * score)^power over the scores of each row (n,).

    >>> hinge(torch.zeros(1, 1), torch.tensor([1]))
    tensor([1.])
    """
    margins = 1 - signs_of(codes, scores.shape[1]).to(scores.dtype) * scores
    return margins.clamp(min=0).pow(power).sum(dim=1)


Loss = Callable[..., torch.Tensor]


def derivatives(loss: Loss, second: bool, rows: Rows, state: State) -> Totals:
    """Return the sums of loss, gradient (k, d + 1) and second derivatives (k (d + 1), k (d + 1)) at `point`."""
    with torch.inference_mode(False), torch.enable_grad():  # whatever the program around `fit` does
        scaled = (rows.x - state["mean"]) / state["scale"]
        columns = torch.cat([scaled, state["one"].expand(len(scaled), 1)], dim=1)  # zeros without intercept
        scores = (columns @ state["point"].T).requires_grad_()
        total = rows.weight.clone() @ loss(scores, codes_of(rows, state))
        (first,) = torch.autograd.grad(total, scores, create_graph=second)
        sums = {"loss": total.detach(), "gradient": first.detach().T @ columns}
        if second:
            slopes = [torch.autograd.grad(each.sum(), scores, retain_graph=True)[0] for each in first.T]
            blocks = [torch.cat([_squares(columns, each) for each in slope.T], dim=1) for slope in slopes]
            sums["second"] = torch.cat(blocks)
    return sums


def _squares(columns: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if not bool(weights.any()):  # scores that have nothing to do with each other
        return columns.new_zeros(columns.shape[1], columns.shape[1])
    return columns.T @ (columns * weights[:, None])


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

    def _zeros(self) -> torch.Tensor:
        """Return coefficients and intercepts (k, d + 1) to begin with."""
        k = 1 if len(self.classes_) == 2 else len(self.classes_)
        return torch.zeros(k, self.n_features_in_ + 1, dtype=torch.float64)

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


@dataclass(eq=False)
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
    _loss: ClassVar[Loss]
    _curvature: ClassVar[float]  # second derivative of a loss, at most
    _penalised_intercept: ClassVar[bool] = False

    def _fit(self, data: Dataset) -> bool:
        require_positive("max_iter", self.max_iter)
        require_number("tol", self.tol)
        require_number("C", self.C, above_zero=True)
        reader = self._reader(data)
        state = self._find_classes(reader)
        mean, variance, weight, _ = moments(reader)
        self.n_features_in_ = len(mean)
        one = torch.tensor(float(self.fit_intercept), dtype=torch.float64)
        # The root of the second derivatives with respect to the coefficients, at most, but for a factor.
        curvature = variance + 1 / (self.C * weight * self._curvature)
        scale = torch.where(curvature > 0, curvature, 1.0).sqrt()
        # A row of `point` times this matrix: coefficients of the inputs themselves, and their intercept.
        unscaled = torch.diag(torch.cat([1 / scale, one[None]]))
        unscaled[:-1, -1] = -one * mean / scale
        weights = torch.ones(len(mean) + 1, dtype=torch.float64)
        weights[-1] = float(self._penalised_intercept)
        penalty = (unscaled * weights) @ unscaled.T / (self.C * weight)
        point = self._zeros()
        second = point.numel() <= MAX_NEWTON
        sums = functools.partial(derivatives, type(self)._loss, second)
        state |= {"mean": one * mean, "scale": scale, "one": one}
        minimum = newton if second else lbfgs
        point, iterations, converged = minimum(
            _Objective(reader, sums, state, penalty, weight), point, self.tol, self.max_iter
        )
        found = point @ unscaled
        self.coef_, self.intercept_ = found[:, :-1].contiguous().numpy(), found[:, -1].contiguous().numpy()
        self.n_iter_ = np.array([iterations])
        return converged


@final
@dataclass(frozen=True)
class _Objective:
    """The objective of the coefficients of the inputs themselves, divided by C times the sum of the weights.

    It is a function of the coefficients of scaled inputs and the intercept, `point` (k, d + 1): a search for these
    needs few steps.
    """

    reader: Reader
    sums: Callable[[Rows, State], Totals]
    state: State
    penalty: torch.Tensor
    weight: float

    def __call__(self, point: torch.Tensor) -> tuple[float, torch.Tensor, Any]:
        """Return the value at `point`, the gradient, and the second derivatives of the losses if there are any."""
        sums = self.reader.fold(self.sums, {**self.state, "point": point})
        slope = point @ self.penalty
        value = float(sums["loss"]) / self.weight + 0.5 * float((slope * point).sum())
        return value, sums["gradient"] / self.weight + slope, sums.get("second")


def newton(objective: _Objective, point: torch.Tensor, tol: float, max_iter: int) -> tuple[torch.Tensor, int, bool]:
    """Return the minimum by Newton's method, the number of iterations, and True if it converged."""
    value, gradient, second = objective(point)
    for iteration in range(1, max_iter + 1):
        matrix = second / objective.weight + torch.block_diag(*[objective.penalty] * len(point))
        # Where the objective does not change (the same intercept for all classes, say), the step is 0.
        matrix.diagonal().add_(1e-12 * matrix.diagonal().mean())
        step = -torch.linalg.solve(matrix, gradient.flatten()).reshape(point.shape)
        decrease, share = -float((gradient * step).sum()), 1.0
        new = objective(point + step)
        while new[0] > value - 1e-4 * share * decrease and share > 1e-10:
            share /= 2
            new = objective(point + share * step)
        if new[0] > value:  # rounding hides what is left
            return point, iteration, True
        converged = decrease / 2 <= tol * value
        point, (value, gradient, second) = point + share * step, new
        if converged:
            return point, iteration, True
    return point, max_iter, False


def lbfgs(objective: _Objective, point: torch.Tensor, tol: float, max_iter: int) -> tuple[torch.Tensor, int, bool]:
    """Return the minimum by L-BFGS, the number of iterations, and True if it converged."""
    point.requires_grad_()
    search = torch.optim.LBFGS(
        [point],
        max_iter=max_iter,
        max_eval=max(25, 2 * max_iter),
        tolerance_grad=tol * 1e-2,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def evaluate() -> float:
        value, point.grad, _ = objective(point.detach())
        return value

    search.step(evaluate)
    iterations = search.state[point]["n_iter"]
    return point.detach(), iterations, iterations < max_iter


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
@dataclass(eq=False)
class LogisticRegression(ConvexClassifier, Probabilistic):
    """Logistic regression; multinomial for more than two classes.

    Minimises C * sum of cross entropies + ||w||^2 / 2, scikit-learn's objective.

    Source: sklearn.linear_model.LogisticRegression.

    >>> model = LogisticRegression().fit([[0.0], [1.0], [4.0]], [0, 0, 1])
    >>> model.predict([[0.5], [5.0]]).tolist()
    [0, 1]
    """

    _loss = staticmethod(cross_entropy)
    _curvature = 0.25
    _probabilities = staticmethod(probabilities)


@final
@dataclass(eq=False)
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

    _loss = staticmethod(hinge)
    _curvature = 2.0
