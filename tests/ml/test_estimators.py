"""The interface that all estimators share: data, parameters, errors."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import base, datasets, model_selection, pipeline, preprocessing
from torch.utils.data import DataLoader, TensorDataset

import raydist as rd

X, Y = datasets.load_wine(return_X_y=True)
X = (X - X.mean(axis=0)) / X.std(axis=0)

MAKERS: dict[str, Callable[..., Any]] = {
    "LinearRegression": rd.ml.LinearRegression,
    "Ridge": rd.ml.Ridge,
    "LogisticRegression": rd.ml.LogisticRegression,
    "LinearSVC": rd.ml.LinearSVC,
    "SDCAClassifier": lambda **settings: rd.ml.SDCAClassifier(C=0.01, random_state=0, **settings),
    "KMeans": lambda **settings: rd.ml.KMeans(3, init=X[[0, 70, 150]], **settings),
    "GaussianMixture": lambda **settings: rd.ml.GaussianMixture(
        3, weights_init=[0.3, 0.3, 0.4], means_init=X[[0, 70, 150]], precisions_init=np.ones(3),
        covariance_type="spherical", **settings,
    ),
}  # fmt: skip


def values_of(model: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(model).items() if key.endswith("_") and not key.startswith("_")}


def assert_same(a: Any, b: Any) -> None:
    """Two estimators have the same fitted values."""
    assert values_of(a).keys() == values_of(b).keys() != set()
    for key, value in values_of(a).items():
        np.testing.assert_allclose(value, values_of(b)[key], rtol=1e-6, atol=1e-8, err_msg=key)


def test_every_estimator_is_here() -> None:
    others = {"WALS", "RandomForestClassifier", "RandomForestRegressor"}  # test_beside_sklearn.py, test_forest.py
    assert set(rd.ml.__all__) == MAKERS.keys() | others


@pytest.mark.parametrize("name", MAKERS)
def test_rows_batches_loaders_and_arrays_are_the_same(name: str) -> None:
    arrays = MAKERS[name](batch_size=50).fit(X, Y)
    rows = rd.Dataset.from_tensor_slices((X, Y))
    loader = DataLoader(TensorDataset(torch.as_tensor(X), torch.as_tensor(Y)), batch_size=50)
    for data in (rows, rows.batch(50), loader):
        model = MAKERS[name](batch_size=50).fit(data)
        assert_same(model, arrays)
        np.testing.assert_allclose(model.predict(data), arrays.predict(X), rtol=1e-6)
        assert model.score(data) == pytest.approx(arrays.score(X, Y), rel=1e-6)
    assert arrays.predict(torch.as_tensor(X)).shape == (len(X),)


@pytest.mark.parametrize("name", sorted(MAKERS.keys() - {"SDCAClassifier"}))
def test_a_weight_of_two_is_the_row_twice(name: str) -> None:
    weight = np.random.default_rng(0).integers(0, 3, len(X)).astype(np.float64)
    twice = np.repeat(np.arange(len(X)), weight.astype(int))
    weighted = MAKERS[name](batch_size=50).fit(X, Y, weight)
    repeated = MAKERS[name](batch_size=50).fit(X[twice], Y[twice])
    for key in ("coef_", "cluster_centers_", "means_"):
        if hasattr(weighted, key):
            np.testing.assert_allclose(getattr(weighted, key), getattr(repeated, key), rtol=1e-4, atol=1e-6)
    assert weighted.score(X, Y, weight) == pytest.approx(repeated.score(X[twice], Y[twice]), rel=1e-4)


@pytest.mark.ray
@pytest.mark.timeout(120)
def test_replicas_without_rows_and_the_strategy_of_the_scope(mirrored: Callable[[int], rd.MirroredStrategy]) -> None:
    """The last batch has one row, and the rows of the two that it leaves out count nevertheless."""
    strategy = mirrored(3)
    data = rd.Dataset.from_tensor_slices((X[:43], Y[:43] + (np.arange(43) % 2))).batch(6)
    for name in ("LinearRegression", "LogisticRegression", "KMeans", "SDCAClassifier"):
        one = MAKERS[name]().fit(data)
        with strategy.scope():
            three = MAKERS[name]().fit(data)
            predicted = three.predict(data)
        if name == "KMeans":  # two replicas never have a row
            apart = data.unbatch().batch(1)
            seeded = rd.ml.KMeans(3, random_state=0, strategy=strategy).fit(apart)
            assert_same(seeded, rd.ml.KMeans(3, random_state=0).fit(apart))
        if name != "SDCAClassifier":  # whose steps depend on the replicas; its end is in test_beside_sklearn.py
            assert_same(three, one)
        np.testing.assert_allclose(predicted, three.predict(X[:43]), rtol=1e-9)
        assert MAKERS[name](strategy=strategy).fit(data).score(data) == pytest.approx(three.score(data))


@pytest.mark.parametrize("name", MAKERS)
def test_scikit_learn_can_use_it(name: str) -> None:
    strategy = rd.OneDeviceStrategy("cpu")
    model = MAKERS[name](strategy=strategy, batch_size=64)
    copy = base.clone(model)
    assert type(copy) is type(model)
    assert copy.strategy is strategy
    assert copy.get_params().keys() == model.get_params().keys()
    steps = pipeline.make_pipeline(preprocessing.StandardScaler(), model).fit(X, Y)
    restored = pickle.loads(pickle.dumps(steps))
    np.testing.assert_array_equal(restored.predict(X), steps.predict(X))
    assert restored[-1].strategy is None
    assert f"{type(model).__name__}(" in repr(model)
    with pytest.raises(rd.InvalidArgumentError, match="must be among"):
        model.set_params(nothing=1)


def test_scikit_learn_searches_for_parameters() -> None:
    search = model_selection.GridSearchCV(rd.ml.LogisticRegression(), {"C": [1e-6, 1.0]}, cv=3).fit(X, Y)
    assert search.best_params_ == {"C": 1.0}
    assert search.best_score_ > 0.95


@pytest.mark.parametrize("name", MAKERS)
def test_before_fit_there_is_nothing(name: str) -> None:
    model = MAKERS[name]()
    with pytest.raises(rd.FailedPreconditionError, match="must be fitted first"):
        model.predict(X)
    with pytest.raises(rd.FailedPreconditionError, match="must be fitted first"):
        model.score(X, Y)


def test_classes_of_any_type() -> None:
    names = np.array(["red", "green", "blue"])[Y]
    model = rd.ml.LogisticRegression().fit(X, names)
    assert model.classes_.tolist() == ["blue", "green", "red"]
    assert (model.predict(X) == names).mean() == model.score(X, names) > 0.98
    data = rd.Dataset.from_tensor_slices((X, Y * 5 - 3))
    numbers = rd.ml.LogisticRegression().fit(data)
    assert numbers.classes_.tolist() == [-3, 2, 7]
    assert set(numbers.predict(data)) == {-3, 2, 7}
    assert numbers.score(data) == model.score(X, names)
    assert numbers.score(X, Y * 5 - 3) == numbers.score(data)
    column = rd.Dataset.from_tensor_slices((X, Y[:, np.newaxis]))
    assert rd.ml.LogisticRegression().fit(column).score(column) == numbers.score(data)
    with pytest.raises(rd.SpecError, match="Give score arrays"):
        model.score(data)


def test_models_can_be_fitted_in_inference_mode() -> None:
    with torch.inference_mode():
        assert rd.ml.LogisticRegression().fit(X, Y).score(X, Y) > 0.98


@pytest.mark.parametrize("model", [rd.ml.LogisticRegression(), rd.ml.LinearSVC()], ids=repr)
@pytest.mark.parametrize("intercept", [True, False])
def test_both_ways_to_the_minimum_agree(model: Any, intercept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model.set_params(fit_intercept=intercept, tol=1e-6)
    newton = base.clone(model).fit(X + 3, Y)
    monkeypatch.setattr("raydist.ml.classifiers.MAX_NEWTON", 0)
    lbfgs = base.clone(model).set_params(max_iter=2000).fit(X + 3, Y)
    assert lbfgs.n_iter_[0] > newton.n_iter_[0]
    np.testing.assert_allclose(lbfgs.coef_, newton.coef_, atol=1e-3)
    assert bool(newton.intercept_.any()) == bool(lbfgs.intercept_.any()) == intercept


def test_a_search_that_is_too_short_warns() -> None:
    with pytest.warns(UserWarning, match="LogisticRegression did not converge in 2"):
        rd.ml.LogisticRegression(max_iter=2, tol=1e-12).fit(X, Y)
    with pytest.warns(UserWarning, match="KMeans did not converge in 1"):
        rd.ml.KMeans(3, max_iter=1, random_state=0).fit(X)
    with pytest.warns(UserWarning, match="GaussianMixture did not converge in 1"):
        rd.ml.GaussianMixture(3, max_iter=1, random_state=0).fit(X)
    with pytest.warns(UserWarning, match="SDCAClassifier did not converge in 1"):
        rd.ml.SDCAClassifier(tol=1e-9, max_iter=1).fit(X, Y)


def test_least_norm_where_features_depend_on_each_other() -> None:
    x = np.concatenate([X, X[:, :3], np.full((len(X), 2), 7.0)], axis=1)
    model = rd.ml.LinearRegression(batch_size=30).fit(x, Y)
    coef, *_ = np.linalg.lstsq(x - x.mean(axis=0), Y - Y.mean(), rcond=1e-10)
    np.testing.assert_allclose(model.coef_, coef, atol=1e-9)
    assert model.rank_ == X.shape[1]


def test_digits_survive_large_means() -> None:
    """Sums of X^T X would have lost all of them."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 3)) + 1e7
    x[:, 2] = x[:, 0] + 1e-2 * x[:, 2] * 1e-5
    model = rd.ml.LinearRegression(batch_size=64).fit(x, (x - 1e7) @ [1.0, 2.0, 3.0])
    np.testing.assert_allclose(model.coef_, [1.0, 2.0, 3.0], atol=1e-2)


def test_sdca_refuses_another_order() -> None:
    data = rd.Dataset.from_tensor_slices((X, Y))
    fixed = data.shuffle(200, seed=1, reshuffle_each_iteration=False).batch(50)
    assert rd.ml.SDCAClassifier(C=0.01).fit(fixed).score(fixed) > 0.95
    with pytest.raises(rd.InvalidArgumentError, match="same order"):
        rd.ml.SDCAClassifier(tol=1e-6).fit(data.shuffle(200, seed=1).batch(50))


def test_a_mixture_without_initial_values_starts_from_k_means() -> None:
    kinds: list[Any] = ["full", "tied", "diag", "spherical"]
    for kind in kinds:
        model = rd.ml.GaussianMixture(3, covariance_type=kind, random_state=0, reg_covar=1e-3).fit(X)
        assert model.converged_
        assert model.means_.shape == (3, 13)
        assert min(model.weights_) > 0.1


NAN = np.where(np.arange(X.size).reshape(X.shape) == 700, np.nan, X)
ROWS = rd.Dataset.from_tensor_slices((X, Y))


REFUSED: list[tuple[Any, tuple[Any, ...], type[Exception], str]] = [
    (rd.ml.Ridge(), (NAN, Y), rd.InvalidArgumentError, "finite numbers"),
    (rd.ml.KMeans(), (NAN,), rd.InvalidArgumentError, "finite numbers"),
    (rd.ml.Ridge(), (X, Y, -np.ones(len(X))), rd.InvalidArgumentError, "weights >= 0"),
    (rd.ml.Ridge(), (ROWS.map(lambda x, y: (x, str(y))),), rd.SpecError, "one tensor of numbers each"),
    (rd.ml.Ridge(), (X,), rd.InvalidArgumentError, "Targets must be given"),
    (rd.ml.Ridge(), (X, Y[:-1]), rd.InvalidArgumentError, "same first dimension"),
    (rd.ml.Ridge(), (X[0], Y), rd.SpecError, "X must be a dense array"),
    (rd.ml.Ridge(), (ROWS, Y), rd.InvalidArgumentError, "belong to arrays"),
    (rd.ml.Ridge(), (ROWS.repeat(),), rd.InvalidArgumentError, "must end"),
    (rd.ml.Ridge(), (ROWS.map(lambda x, y: x),), rd.SpecError, "must hold targets"),
    (rd.ml.Ridge(), (ROWS.map(lambda x, y: {"x": x, "y": y}),), rd.SpecError, "Elements must be x"),
    (rd.ml.Ridge(), (ROWS.batch(2).batch(2),), rd.SpecError, "must be a vector"),
    (rd.ml.Ridge(), (ROWS.filter(lambda x, y: False),), rd.InvalidArgumentError, "must have rows"),
    (rd.ml.Ridge(-1.0), (X, Y), rd.InvalidArgumentError, "alpha must be"),
    (rd.ml.Ridge(batch_size=0), (X, Y), rd.InvalidArgumentError, "batch_size must be"),
    (rd.ml.Ridge(strategy=rd.ParameterServerStrategy(1, 1)), (X, Y), rd.InvalidArgumentError, "synchronous"),
    (rd.ml.LogisticRegression(), (X, 0 * Y), rd.InvalidArgumentError, "two classes"),
    (rd.ml.LinearSVC(C=0.0), (X, Y), rd.InvalidArgumentError, "C must be a number > 0"),
    (rd.ml.KMeans(tol=None), (X,), rd.InvalidArgumentError, "tol must be a number >= 0, got None"),  # type: ignore[arg-type]
    (rd.ml.SDCAClassifier(loss="log"), (X, Y), rd.InvalidArgumentError, "loss must be"),  # type: ignore[arg-type]
    (rd.ml.KMeans(4), (X[:3],), rd.InvalidArgumentError, "at least n_clusters=4 rows, got 3"),
    (rd.ml.KMeans(init="best"), (X,), rd.InvalidArgumentError, "init must be"),
    (rd.ml.KMeans(3, init=X[:2]), (X,), rd.InvalidArgumentError, r"shape \(3, 13\), got \(2, 13\)"),
    (rd.ml.KMeans(2, init=X[:2, :5]), (X,), rd.InvalidArgumentError, r"shape \(2, 13\), got \(2, 5\)"),
    (rd.ml.GaussianMixture(covariance_type="round"), (X,), rd.InvalidArgumentError, "covariance_type"),  # type: ignore[arg-type]
    (rd.ml.GaussianMixture(reg_covar=0.0), (0 * X,), rd.InvalidArgumentError, "positive definite"),
    (rd.ml.WALS(), (X, Y), rd.InvalidArgumentError, "pairs"),
    (rd.ml.WALS(shape=(2, 2)), ([[0, 2]], [1.0]), rd.InvalidArgumentError, "below the shape"),
    (rd.ml.WALS(), ([[0, 1.5]], [1.0]), rd.InvalidArgumentError, "whole numbers"),
    (rd.ml.WALS(regularization=0.0), ([[0, 2]], [1.0]), rd.InvalidArgumentError, "regularization must be"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "data", "error", "text"), REFUSED, ids=[case[3] for case in REFUSED])
def test_errors_say_what_must_hold(model: Any, data: tuple[Any, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        model.fit(*data)


def test_rows_with_other_features() -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"must have 13 features, got the shape \(178, 5\)"):
        rd.ml.Ridge().fit(X, Y).predict(X[:, :5])


def test_pairs_outside_of_the_matrix() -> None:
    model = rd.ml.WALS(2, random_state=0, max_iter=100).fit([[0, 0], [1, 1]], [1.0, 2.0])
    with pytest.raises(rd.InvalidArgumentError, match="fitted matrix of 2 x 2"):
        model.predict([[0, 2]])
