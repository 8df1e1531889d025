"""Random forests by XGBoost on Ray Train; where the package is missing, the error that says so."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import numpy as np
import pytest
from sklearn import datasets, ensemble
from sklearn.model_selection import train_test_split

import raydist as rd

installed = pytest.mark.skipif(importlib.util.find_spec("xgboost") is None, reason="needs xgboost")


def test_without_xgboost_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgboost", None)
    for model in (rd.ml.RandomForestClassifier(), rd.ml.RandomForestRegressor()):
        with pytest.raises(rd.FailedPreconditionError, match=r"pip install 'raydist\[xgboost\]'"):
            model.fit([[0.0], [1.0]], [0, 1])
        with pytest.raises(rd.FailedPreconditionError, match="must be fitted first"):
            model.predict([[0.0]])


def model_of(params: dict[str, Any]) -> rd.ml.RandomForestClassifier:
    model = rd.ml.RandomForestClassifier().set_params(**params)
    model.n_features_in_ = 16
    return model


def test_parameters_are_those_of_a_random_forest() -> None:
    given = {"n_estimators": 7, "max_depth": 3, "min_samples_leaf": 2, "random_state": 5}
    params = model_of(given)._params(3)
    assert (params["num_parallel_tree"], params["eta"], params["lambda"]) == (7, 1.0, 0.0)
    assert (params["max_depth"], params["min_child_weight"], params["seed"]) == (3, 2, 5)
    assert params["colsample_bynode"] == 0.25
    for wrong in ({"max_features": 3.0}, {"max_samples": 0.0}, {"n_estimators": 0}, {"max_depth": 0}):
        with pytest.raises(rd.InvalidArgumentError, match=next(iter(wrong))):
            model_of(wrong)._params(3)


@installed
@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name", ["digits", "wine", "breast_cancer"])
@pytest.mark.usefixtures("ray_cluster")
def test_forests_are_as_accurate_as_those_of_scikit_learn(name: str, workers: int) -> None:
    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    x, x_test, y, y_test = train_test_split(x, y, test_size=0.4, random_state=0)
    ours = rd.ml.RandomForestClassifier(100, random_state=0, num_workers=workers).fit(x, y)
    theirs = ensemble.RandomForestClassifier(100, random_state=0).fit(x, y)
    assert ours.score(x_test, y_test) >= theirs.score(x_test, y_test) - 0.02
    assert np.abs(ours.predict_proba(x_test) - theirs.predict_proba(x_test)).mean() < 0.05


@installed
@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ray_cluster")
def test_regression_of_a_dataset() -> None:
    x, y = datasets.load_diabetes(return_X_y=True)
    x, x_test, y, y_test = train_test_split(x, y, test_size=0.4, random_state=0)
    data = rd.Dataset.from_tensor_slices((x, y)).batch(50)
    ours = rd.ml.RandomForestRegressor(100, random_state=0, num_workers=3).fit(data)
    theirs = ensemble.RandomForestRegressor(100, random_state=0).fit(x, y)
    assert ours.score(x_test, y_test) >= theirs.score(x_test, y_test) - 0.03
    assert ours.score(data) > 0.5
