"""K-means: Lloyd's algorithm on sums over the rows of each cluster."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, final

import numpy as np
import torch

from raydist.core.errors import InvalidArgumentError
from raydist.dataset import Dataset
from raydist.ml.estimator import Estimator, initial_values, moments, require_number, require_positive, seed_of
from raydist.ml.passes import Reader, Rows, State, Totals


def nearest(x: torch.Tensor, state: State) -> torch.Tensor:
    """Return the number of the nearest center of each row.

    >>> nearest(torch.tensor([[1.0], [5.0]]), {"centers": torch.tensor([[0.0], [4.0]]), "mean": torch.zeros(1)})
    tensor([0, 1])
    """
    centers = state["centers"] - state["mean"]  # smaller numbers, so that squares lose fewer digits
    return torch.addmm(centers.square().sum(dim=1), x - state["mean"], centers.T, alpha=-2).argmin(dim=1)


def distances(x: torch.Tensor, state: State) -> torch.Tensor:
    """Return the distance of each row from each center."""
    return torch.cdist(x, state["centers"], compute_mode="donot_use_mm_for_euclid_dist")


def cluster_sums(rows: Rows, state: State) -> Totals:
    """Return weight and sum of the rows of each cluster, and the sum of squared distances from the centers."""
    labels = nearest(rows.x, state)
    apart = rows.x - state["centers"][labels]
    weighted = apart * rows.weight[:, None]
    zeros = torch.zeros_like(state["centers"])
    return {
        "weight": zeros[:, 0].index_add(0, labels, rows.weight),
        "shift": zeros.index_add(0, labels, weighted),  # from the present center
        "inertia": (weighted * apart).sum(),
    }


def next_center(rows: Rows, state: State) -> Totals:
    """Return the row that a draw with weights of squared distances from the `centers` chooses.

    The random number in [0, 1) of each row is its target. The row with the largest log(number) / weight is chosen with
    a probability proportional to its weight (Efraimidis and Spirakis, 2006).
    """
    weight = rows.weight
    if len(state["centers"]):
        weight = weight * distances(rows.x, state).amin(dim=1).square()
    key = rows.targets.log() / weight
    best = key.topk(min(1, len(key))).indices
    return {"key": key[best], "row": rows.x[best]}


def larger_key(a: Totals, b: Totals) -> Totals:
    """Return the one with the larger key."""
    keys = torch.cat([a["key"], b["key"]])
    best = keys.topk(min(1, len(keys))).indices
    return {"key": keys[best], "row": torch.cat([a["row"], b["row"]])[best]}


def with_numbers(*element: Any, rng: np.random.Generator) -> tuple[Any, ...]:
    """Replace the targets of a batch by random numbers, which depend on the seed and the place of the batch alone."""
    x, *others = element
    return (x, rng.random(len(x)), *others[1:])


@final
@dataclass(eq=False)
class KMeans(Estimator):
    """K-means clustering by Lloyd's algorithm, one pass for each iteration.

    A cluster that loses all of its rows keeps its center.

    Args:
        n_clusters: The number of clusters k.
        init: "k-means++", which takes a pass for each center, or initial centers (k, d).
        max_iter: Limit of the number of iterations.
        tol: Stop once the centers move by less: their squared distances, relative to the mean variance of the features.
        random_state: Seed of k-means++; None for a new one.

    Attributes:
        cluster_centers_: The centers (k, d).
        inertia_: The sum of the rows' squared distances from their nearest centers.
        n_iter_: The number of iterations.

    Source: sklearn.cluster.KMeans.

    >>> model = KMeans(2, random_state=0).fit([[0.0], [1.0], [9.0], [10.0]])
    >>> sorted(model.cluster_centers_[:, 0].tolist())
    [0.5, 9.5]
    """

    n_clusters: int = 8
    _: KW_ONLY
    init: Any = "k-means++"
    max_iter: int = 300
    tol: float = 1e-4
    random_state: int | None = None
    _kind = "clusterer"
    _fitted = "cluster_centers_"

    def _fit(self, data: Dataset) -> bool:
        require_positive("max_iter", self.max_iter)
        reader = self._reader(data)
        self._mean, variance, _, num_rows = moments(reader)
        if require_positive("n_clusters", self.n_clusters) > num_rows:
            raise InvalidArgumentError(f"There must be at least n_clusters={self.n_clusters} rows, got {num_rows}.")
        self.n_features_in_ = len(self._mean)
        centers = self._start(data)
        limit = require_number("tol", self.tol) * float(variance.mean()) + 1e-28 * float(centers.square().sum())
        for iteration in range(1, self.max_iter + 1):
            self.n_iter_ = iteration
            sums = reader.fold(cluster_sums, {"centers": centers, "mean": self._mean})
            shift = sums["shift"] / sums["weight"].where(sums["weight"] > 0, 1.0)[:, None]
            centers = centers + shift
            if converged := float(shift.square().sum()) <= limit:
                break
        self.cluster_centers_: np.ndarray = centers.numpy()
        self.inertia_ = -self._score(reader)
        return converged

    def _start(self, data: Dataset) -> torch.Tensor:
        """Return the given centers, or those of k-means++ (Arthur and Vassilvitskii, 2007): a pass for each."""
        if not isinstance(self.init, str):
            return initial_values(self.init, self.n_clusters, self.n_features_in_)
        if self.init != "k-means++":
            raise InvalidArgumentError(f'init must be "k-means++" or an array of centers, got {self.init!r}.')
        reader = self._reader(data.map(with_numbers, seed=seed_of(self.random_state)))
        centers = torch.zeros(0, self.n_features_in_, dtype=torch.float64)
        for _ in range(self.n_clusters):
            centers = torch.cat([centers, reader.fold(next_center, {"centers": centers}, larger_key)["row"]])
        return centers

    def _state(self) -> State:
        return {"centers": torch.as_tensor(self.cluster_centers_), "mean": self._mean}

    _predicted = staticmethod(nearest)

    def _score(self, reader: Reader) -> float:
        return -float(reader.fold(cluster_sums, self._state())["inertia"])

    def fit_predict(self, X: Any, y: Any = None, sample_weight: Any = None) -> np.ndarray:
        """Fit, and return the number of the nearest center of each row, (n,). Blocks.

        Args:
            X: Rows, as for `fit`.
            y: Ignored.
            sample_weight: Weights of the rows of an array.

        >>> KMeans(1).fit_predict([[0.0], [9.0]]).tolist()
        [0, 0]
        """
        return self.fit(X, y, sample_weight).predict(X)

    def transform(self, X: Any) -> np.ndarray:
        """Return the distance of each row from each center, (n, k). Blocks.

        Args:
            X: Rows: an array (n, d), or a dataset.

        Raises:
            FailedPreconditionError: The estimator is not fitted.

        >>> KMeans(2, init=[[0.0], [9.0]]).fit([[0.0], [9.0]]).transform([[1.0]]).tolist()
        [[1.0, 8.0]]
        """
        return self._outputs(X, distances)
