"""Gaussian mixtures by expectation maximisation."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, final

import numpy as np
import torch

from raydist.core.errors import InvalidArgumentError
from raydist.dataset import Dataset
from raydist.ml.estimator import Probabilistic, initial_values, means, require_number, require_positive
from raydist.ml.kmeans import KMeans, nearest
from raydist.ml.passes import Reader, Rows, State, Totals

_TYPES = ("full", "tied", "diag", "spherical")


def log_densities(x: torch.Tensor, state: State) -> torch.Tensor:
    """Return the log of weight times density of each component (n, k).

    `roots` holds the Cholesky factors of the precisions: (k, d, d) or (1, d, d); or their diagonals (k, d) or (k, 1).
    """
    roots, d = state["roots"], x.shape[1]
    columns = []
    for k, mean in enumerate(state["means"]):
        root = roots[k if len(roots) > 1 else 0]
        apart = (x - mean) @ root if root.ndim == 2 else (x - mean) * root
        diagonal = root.diagonal() if root.ndim == 2 else root.expand(d)
        columns.append(diagonal.log().sum() - 0.5 * (d * math.log(2 * math.pi) + apart.square().sum(dim=1)))
    return torch.stack(columns, dim=1) + state["weights"].log()


def responsibilities(x: torch.Tensor, state: State) -> torch.Tensor:
    """Return the probability of each component (n, k)."""
    return log_densities(x, state).softmax(dim=1)


def most_probable(x: torch.Tensor, state: State) -> torch.Tensor:
    """Return the number of the most probable component."""
    return log_densities(x, state).argmax(dim=1)


def log_likelihoods(x: torch.Tensor, state: State) -> torch.Tensor:
    """Return the log of the density at each row."""
    return log_densities(x, state).logsumexp(dim=1)


def expectation(rows: Rows, state: State) -> Totals:
    """Return the log likelihood, and the moments of the rows of each component about its present mean."""
    logs = log_densities(rows.x, state)
    norm = logs.logsumexp(dim=1)
    return {"log": rows.weight @ norm, **moments_of(rows, (logs - norm[:, None]).exp(), state)}


def hard_expectation(rows: Rows, state: State) -> Totals:
    """Return the moments for rows that belong to their nearest mean alone."""
    labels = nearest(rows.x, {"centers": state["means"], "mean": state["means"].mean(dim=0)})
    return moments_of(rows, torch.nn.functional.one_hot(labels, len(state["means"])), state)


def moments_of(rows: Rows, shares: torch.Tensor, state: State) -> Totals:
    """Return sums of shares, and first and second moments: matrices, or their diagonals if `full` is False."""
    shares = shares * rows.weight[:, None]
    first, second = [], []
    for share, mean in zip(shares.T, state["means"], strict=True):
        apart = rows.x - mean
        weighted = apart * share[:, None]
        first.append(weighted.sum(dim=0))
        second.append(weighted.T @ apart if bool(state["full"]) else (weighted * apart).sum(dim=0))
    sums = {"first": torch.stack(first), "second": torch.stack(second)}
    return {"n": rows.weight.sum(), "shares": shares.sum(dim=0), **sums}


def roots_of(covariances: torch.Tensor, *, full: bool) -> torch.Tensor:
    """Return the Cholesky factors of the precisions, upper triangular, or their diagonals."""
    lower, info = torch.linalg.cholesky_ex(covariances) if full else (covariances.sqrt(), covariances <= 0)
    if bool(info.any()):
        raise InvalidArgumentError(
            "The covariances of a Gaussian mixture must be positive definite, but a component has shrunk to few rows. "
            "Use fewer components, a larger reg_covar, or features of a similar scale."
        )
    if not full:
        return 1 / lower
    eye = torch.eye(covariances.shape[-1], dtype=torch.float64).expand_as(covariances)
    roots: torch.Tensor = torch.linalg.solve_triangular(lower, eye, upper=False)
    return roots.mT.contiguous()


@final
@dataclass(eq=False)
class GaussianMixture(Probabilistic):
    """A mixture of Gaussians, fitted by expectation maximisation: one pass for each iteration.

    Args:
        n_components: The number of components k.
        covariance_type: "full": a covariance matrix for each component. "tied": one for all. "diag": variances of the
            features for each component. "spherical": one variance for each component.
        tol: Stop once the mean log likelihood of a row changes by less.
        reg_covar: Added to all variances.
        max_iter: Limit of the number of iterations.
        weights_init: Initial weights (k,); None for those of k-means clusters.
        means_init: Initial means (k, d); None for those of k-means clusters.
        precisions_init: Inverses of the initial covariances, in the shape of `covariances_`; None for those of k-means.
        random_state: Seed of k-means; None for a new one.

    Attributes:
        weights_: Weights of the components (k,).
        means_: Means (k, d).
        covariances_: (k, d, d); "tied": (d, d); "diag": (k, d); "spherical": (k,).
        precisions_cholesky_: Upper triangular factors of the inverse covariances, or roots of the inverse variances.
        lower_bound_: Mean log likelihood of a row in the last iteration.
        converged_: True if the last change was less than `tol`.
        n_iter_: The number of iterations.

    Source: sklearn.mixture.GaussianMixture.

    >>> model = GaussianMixture(2, random_state=0).fit([[0.0], [1.0], [9.0], [10.0]])
    >>> sorted(model.means_[:, 0].round(3).tolist())
    [0.5, 9.5]
    """

    n_components: int = 1
    _: KW_ONLY
    covariance_type: Literal["full", "tied", "diag", "spherical"] = "full"
    tol: float = 1e-3
    reg_covar: float = 1e-6
    max_iter: int = 100
    weights_init: Any = None
    means_init: Any = None
    precisions_init: Any = None
    random_state: int | None = None
    _fitted = "precisions_cholesky_"

    def _fit(self, data: Dataset) -> bool:
        require_positive("max_iter", self.max_iter)
        require_number("reg_covar", self.reg_covar)
        if self.covariance_type not in _TYPES:
            raise InvalidArgumentError(f"covariance_type must be one of {_TYPES}, got {self.covariance_type!r}.")
        reader = self._reader(data)
        self._start(reader, data)
        self.converged_, self.lower_bound_ = False, -math.inf
        for iteration in range(1, self.max_iter + 1):
            self.n_iter_ = iteration
            sums, previous = reader.fold(expectation, self._state()), self.lower_bound_
            self._maximise(sums)
            self.lower_bound_ = float(sums["log"] / sums["n"])
            if abs(self.lower_bound_ - previous) < self.tol:
                self.converged_ = True
                break
        return self.converged_

    @property
    def _is_full(self) -> bool:
        """True if covariances are matrices, not variances alone."""
        return self.covariance_type in ("full", "tied")

    def _start(self, reader: Reader, data: Dataset) -> None:
        """Set the initial parameters: those given, and for others those of k-means clusters."""
        k, d = require_positive("n_components", self.n_components), len(reader.fold(means)["x"])
        self.n_features_in_ = d
        if any(value is None for value in (self.weights_init, self.means_init, self.precisions_init)):
            k_means = KMeans(k, random_state=self.random_state, strategy=self.strategy, batch_size=self.batch_size)
            self.means_ = k_means.fit(data).cluster_centers_
            state = {"means": torch.as_tensor(self.means_), "full": torch.tensor(self._is_full)}
            self._maximise(reader.fold(hard_expectation, state))
        if self.weights_init is not None:
            self.weights_ = initial_values([self.weights_init], 1, k)[0].numpy()
        if self.means_init is not None:
            self.means_ = initial_values(self.means_init, k, d).numpy()
        if self.precisions_init is not None:
            precisions = torch.as_tensor(np.asarray(self.precisions_init, dtype=np.float64))
            expected = dict(zip(_TYPES, [(k, d, d), (d, d), (k, d), (k,)], strict=True))[self.covariance_type]
            if tuple(precisions.shape) != expected:
                raise InvalidArgumentError(
                    f"precisions_init must have the shape {expected}, got {tuple(precisions.shape)}."
                )
            inverse = precisions.inverse() if self._is_full else precisions.reciprocal()
            self.precisions_cholesky_ = roots_of(inverse, full=self._is_full).numpy()

    def _maximise(self, sums: Totals) -> None:
        """Set weights, means and covariances from the moments about the present means."""
        shares = sums["shares"] + 10 * torch.finfo(torch.float64).eps
        shift, second = sums["first"] / shares[:, None], sums["second"]
        weights, centers = shares / shares.sum(), torch.as_tensor(self.means_) + shift
        if self._is_full:
            covariances = second / shares[:, None, None] - shift[:, :, None] * shift[:, None, :]
            covariances += self.reg_covar * torch.eye(self.n_features_in_, dtype=torch.float64)
        else:
            covariances = second / shares[:, None] - shift.square() + self.reg_covar
        if self.covariance_type == "tied":
            covariances = (weights[:, None, None] * covariances).sum(dim=0)
        elif self.covariance_type == "spherical":
            covariances = covariances.mean(dim=1)
        self.precisions_cholesky_ = roots_of(covariances, full=self._is_full).numpy()
        self.weights_, self.means_, self.covariances_ = weights.numpy(), centers.numpy(), covariances.numpy()

    def _state(self) -> State:
        roots = torch.as_tensor(self.precisions_cholesky_)
        kind = self.covariance_type
        return {
            "weights": torch.as_tensor(self.weights_),
            "means": torch.as_tensor(self.means_),
            "roots": roots[None] if kind == "tied" else roots[:, None] if kind == "spherical" else roots,
            "full": torch.tensor(self._is_full),
        }

    @property
    def precisions_(self) -> np.ndarray:
        """The inverses of the covariances.

        >>> GaussianMixture(reg_covar=0.0).fit([[0.0], [2.0]]).precisions_.round(6).tolist()
        [[[1.0]]]
        """
        self._require_fitted()
        roots = self.precisions_cholesky_
        return roots @ np.swapaxes(roots, -1, -2) if self._is_full else roots**2

    _predicted = staticmethod(most_probable)
    _probabilities = staticmethod(responsibilities)

    def _score(self, reader: Reader) -> float:
        sums = reader.fold(expectation, self._state())
        return float(sums["log"] / sums["n"])

    def score_samples(self, X: Any) -> np.ndarray:
        """Return the log of the density at each row, (n,). Blocks.

        Args:
            X: Rows: an array (n, d), or a dataset.

        Raises:
            FailedPreconditionError: The estimator is not fitted.

        >>> GaussianMixture().fit([[0.0], [2.0]]).score_samples([[1.0]]).round(3).tolist()
        [-0.919]
        """
        return self._outputs(X, log_likelihoods)
