"""`rd.ml` beside scikit-learn on its data sets, on one device and on three replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn import cluster, datasets, linear_model, mixture, svm

import raydist as rd

pytestmark = pytest.mark.timeout(150)

# Data sets that `make test` uses, by the number of replicas; others are left to `make test-long`.
QUICK = {1: {"wine", "breast_cancer", "diabetes"}, 3: {"wine", "diabetes"}}


def cases(*names: str) -> pytest.MarkDecorator:
    """Each data set on one device and on three replicas."""

    def case(name: str, n: int) -> Any:
        marks = [pytest.mark.ray] * (n > 1) + [pytest.mark.long] * (name not in QUICK[n])
        return pytest.param(name, n, marks=marks)

    return pytest.mark.parametrize(("name", "replicas"), [case(name, n) for n in QUICK for name in names])


@pytest.fixture
def strategy(replicas: int, request: pytest.FixtureRequest) -> rd.Strategy:
    found = rd.OneDeviceStrategy("cpu") if replicas == 1 else request.getfixturevalue("mirrored")(replicas)
    assert isinstance(found, rd.Strategy)
    return found


def load(name: str) -> tuple[np.ndarray, np.ndarray]:
    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    return x, y


def assert_close(ours: Any, theirs: Any, limit: float) -> None:
    """They differ by at most `limit` of the largest value."""
    assert np.abs(np.asarray(ours) - theirs).max() <= limit * max(np.abs(theirs).max(), 1e-12)


@cases("digits", "wine", "breast_cancer", "diabetes")
def test_linear_models_have_the_same_coefficients(name: str, strategy: rd.Strategy) -> None:
    x, y = load(name)
    weight = np.random.default_rng(0).random(len(x))
    for ours, theirs, weights in (
        (rd.ml.LinearRegression(strategy=strategy, batch_size=100), linear_model.LinearRegression(), None),
        (rd.ml.Ridge(0.7, strategy=strategy, batch_size=100), linear_model.Ridge(0.7), None),
        (
            rd.ml.Ridge(0.7, fit_intercept=False, strategy=strategy),
            linear_model.Ridge(0.7, fit_intercept=False),
            weight,
        ),
    ):
        ours.fit(x, y, weights)
        theirs.fit(x, y, weights)
        assert_close(ours.coef_, theirs.coef_, 1e-8)
        assert abs(ours.intercept_ - theirs.intercept_) <= 1e-8 * (1 + abs(theirs.intercept_))
        assert_close(ours.predict(x), theirs.predict(x), 1e-8)
        assert abs(ours.score(x, y, weights) - theirs.score(x, y, weights)) <= 1e-8


@cases("diabetes")
def test_several_targets_and_penalties(name: str, strategy: rd.Strategy) -> None:
    x, y = load(name)
    targets = np.stack([y, y**0.5, x[:, 0]], axis=1)
    ours = rd.ml.Ridge([0.1, 1.0, 2.0], strategy=strategy, batch_size=100).fit(x, targets)
    theirs = linear_model.Ridge([0.1, 1.0, 2.0]).fit(x, targets)
    assert_close(ours.coef_, theirs.coef_, 1e-8)
    assert_close(ours.intercept_, theirs.intercept_, 1e-8)
    assert abs(ours.score(x, targets) - theirs.score(x, targets)) <= 1e-8


def penalised(model: Any, losses: np.ndarray, *, intercept: bool) -> float:
    squares = (model.coef_**2).sum() + intercept * (model.intercept_**2).sum()
    return float(model.C * losses.sum() + squares / 2)


def logistic_objective(model: Any, x: np.ndarray, y: np.ndarray) -> float:
    chosen = model.predict_proba(x)[np.arange(len(y)), y]
    return penalised(model, -np.log(chosen), intercept=False)


def hinge_objective(model: Any, x: np.ndarray, y: np.ndarray, power: int = 2) -> float:
    scores = model.decision_function(x)
    signs = 2.0 * (y if scores.ndim == 1 else y[:, None] == np.arange(scores.shape[1])) - 1
    return penalised(model, np.maximum(0, 1 - signs * scores) ** power, intercept=True)


@cases("digits", "wine", "breast_cancer")
def test_logistic_regression_reaches_the_objective(name: str, strategy: rd.Strategy) -> None:
    x, y = load(name)
    ours = rd.ml.LogisticRegression(strategy=strategy, batch_size=500).fit(x, y)
    theirs = linear_model.LogisticRegression(tol=1e-7, max_iter=500, solver="newton-cholesky").fit(x, y)
    assert logistic_objective(ours, x, y) <= (1 + 1e-4) * logistic_objective(theirs, x, y)
    assert ours.coef_.shape == theirs.coef_.shape
    assert ours.n_iter_[0] < 20
    assert ours.score(x, y) == pytest.approx(theirs.score(x, y), abs=0.002)
    assert_close(ours.predict_proba(x), theirs.predict_proba(x), 0.01)


@cases("digits", "wine", "breast_cancer")
def test_linear_svc_reaches_the_objective(name: str, strategy: rd.Strategy) -> None:
    x, y = load(name)
    ours = rd.ml.LinearSVC(C=0.5, strategy=strategy, batch_size=500).fit(x, y)
    theirs = svm.LinearSVC(C=0.5, dual=False, tol=1e-6, max_iter=10_000).fit(x, y)
    assert hinge_objective(ours, x, y) <= (1 + 1e-4) * hinge_objective(theirs, x, y)
    assert ours.score(x, y) == pytest.approx(theirs.score(x, y), abs=0.005)


def test_every_step_of_newtons_method_is_tried() -> None:
    """A full step from near the minimum can lead away from it, where losses have kinks."""
    x, y = load("digits")
    y = (y == 8).astype(int)
    ours = rd.ml.LinearSVC(C=1000.0).fit(x, y)
    theirs = rd.ml.LinearSVC(C=1000.0, tol=1e-7).fit(x, y)
    assert hinge_objective(ours, x, y) <= 1.001 * hinge_objective(theirs, x, y)


@cases("digits", "wine", "breast_cancer")
def test_sdca_reaches_the_objective_of_linear_svc(name: str, strategy: rd.Strategy) -> None:
    x, y = load(name)
    x = (x - x.mean(axis=0)) / (x.std(axis=0) + 1)
    for loss, power in (("squared_hinge", 2), ("hinge", 1)):
        ours = rd.ml.SDCAClassifier(C=0.01, loss=loss, tol=5e-5, random_state=0, strategy=strategy, batch_size=500)  # type: ignore[arg-type]
        theirs = svm.LinearSVC(C=0.01, loss=loss, dual=True, tol=1e-6, max_iter=10_000).fit(x, y)
        reached = hinge_objective(ours.fit(x, y), x, y, power)
        least = hinge_objective(theirs, x, y, power)
        assert reached <= (1 + 1e-4) * least
        assert ours.duality_gap_ * reached >= reached - least - 1e-9


def starts(x: np.ndarray, k: int) -> np.ndarray:
    """Rows, moved a little, so that no other row is exactly as far from one as from another."""
    order = np.random.default_rng(0).permutation(len(x))
    return 0.9 * x[order[:k]] + 0.1 * np.stack([x[part].mean(axis=0) for part in np.array_split(order, k)])


@cases("digits", "wine", "breast_cancer")
def test_k_means_from_the_same_start(name: str, strategy: rd.Strategy) -> None:
    x, _ = load(name)
    start = starts(x, 6)
    ours = rd.ml.KMeans(6, init=start, strategy=strategy, batch_size=500).fit(x)
    theirs = cluster.KMeans(6, init=start, n_init=1, algorithm="lloyd").fit(x)
    assert_close(ours.cluster_centers_, theirs.cluster_centers_, 1e-6)
    assert ours.inertia_ == pytest.approx(theirs.inertia_, rel=1e-6)
    assert ours.n_iter_ == theirs.n_iter_
    assert (ours.predict(x) == theirs.predict(x)).all()
    assert_close(ours.transform(x), theirs.transform(x), 1e-6)
    assert ours.score(x) == pytest.approx(theirs.score(x), rel=1e-6)


@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical"])
@cases("digits", "wine", "breast_cancer")
def test_gaussian_mixtures_from_the_same_start(name: str, strategy: rd.Strategy, kind: Any) -> None:
    x, _ = load(name)
    x = ((x - x.mean(axis=0)) / (x.std(axis=0) + 0.1))[:, :20]
    d = x.shape[1]
    precisions = {
        "full": np.stack([np.eye(d)] * 3),
        "tied": np.eye(d),
        "diag": np.ones((3, d)),
        "spherical": np.ones(3),
    }
    settings: dict[str, Any] = {
        "covariance_type": kind,
        "weights_init": np.array([0.5, 0.3, 0.2]),
        "means_init": starts(x, 3),
        "precisions_init": precisions[kind],
        "reg_covar": 1e-3,
        "tol": 1e-2,
    }
    ours = rd.ml.GaussianMixture(3, strategy=strategy, batch_size=500, **settings).fit(x)
    theirs = mixture.GaussianMixture(3, **settings).fit(x)
    assert ours.n_iter_ == theirs.n_iter_ > 1
    assert_close(ours.weights_, theirs.weights_, 1e-6)
    assert_close(ours.means_, theirs.means_, 1e-6)
    assert_close(ours.covariances_, theirs.covariances_, 1e-6)
    assert_close(ours.precisions_, theirs.precisions_, 1e-6)
    assert_close(ours.predict_proba(x), theirs.predict_proba(x), 1e-6)
    assert_close(ours.score_samples(x), theirs.score_samples(x), 1e-6)
    assert (ours.predict(x) == theirs.predict(x)).all()
    assert ours.score(x) == pytest.approx(theirs.score(x), rel=1e-6)


def dense_wals(
    ratings: np.ndarray, weights: np.ndarray, columns: np.ndarray, penalty: float, num_iterations: int
) -> tuple[np.ndarray, np.ndarray]:
    """Alternating least squares over all places of the matrix, one row after the other."""
    rows = np.zeros((len(ratings), columns.shape[1]))
    for _ in range(num_iterations):
        for own, other, r, w in ((rows, columns, ratings, weights), (columns, rows, ratings.T, weights.T)):
            for i in range(len(own)):
                left = other.T @ np.diag(w[i]) @ other + penalty * np.eye(other.shape[1])
                own[i] = np.linalg.solve(left, other.T @ (w[i] * r[i]))
    return rows, columns


@pytest.mark.parametrize("replicas", [1, pytest.param(3, marks=pytest.mark.ray)])
@pytest.mark.parametrize("unobserved", [0.0, 0.2])
def test_wals_beside_a_dense_loop(strategy: rd.Strategy, unobserved: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    observed = rng.random((23, 17)) < 0.3
    observed[3], observed[:, 5] = False, False
    ratings = np.where(observed, rng.random((23, 17)) * 4 + 1, 0.0)
    weights = np.where(observed, rng.random((23, 17)) + 0.5, unobserved)
    start = rng.normal(size=(17, 4))
    pairs = rng.permutation(np.argwhere(observed))
    at = tuple(pairs.T)
    monkeypatch.setattr("raydist.ml.wals.MAX_SUMS", 160)  # 10 rows in a pass
    model = rd.ml.WALS(
        4, regularization=0.3, unobserved_weight=unobserved, max_iter=5, tol=0.0, shape=(23, 17), init=start,
        strategy=strategy, batch_size=20,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="WALS did not converge in 5"):
        model.fit(pairs, ratings[at], weights[at])
    rows, columns = dense_wals(ratings, weights, start.copy(), 0.3, 5)
    assert_close(model.row_factors_, rows, 1e-8)
    assert_close(model.column_factors_, columns, 1e-8)
    every = (weights * (ratings - rows @ columns.T) ** 2).sum() + 0.3 * (rows**2).sum() + 0.3 * (columns**2).sum()
    assert model.loss_ == pytest.approx(every, rel=1e-9)
    assert_close(model.predict(pairs), (rows @ columns.T)[at], 1e-8)


@pytest.mark.ray
def test_k_means_plus_plus_draws_the_same_rows_on_any_number_of_replicas(
    mirrored: Callable[[int], rd.MirroredStrategy],
) -> None:
    x, _ = load("wine")
    data = rd.Dataset.from_tensor_slices(x).batch(32)
    one, three = (
        rd.ml.KMeans(4, random_state=7, strategy=strategy).fit(data)
        for strategy in (rd.OneDeviceStrategy(), mirrored(3))
    )
    assert_close(three.cluster_centers_, one.cluster_centers_, 1e-9)
    best = cluster.KMeans(4, n_init=10, random_state=0).fit(x).inertia_
    found = [rd.ml.KMeans(4, random_state=seed).fit(data).inertia_ for seed in range(5)]
    assert min(found) < 1.05 * best
    assert len(set(found)) > 1
    assert np.median(found) < 1.5 * best
