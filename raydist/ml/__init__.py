"""Ready models with scikit-learn's interface, for data that are streamed from a pipeline, on any synchronous strategy.

`fit` takes a `raydist.Dataset` of rows or batches, or arrays; it needs the memory of a batch and of the model. All
computation is in float64. On N replicas results are those of one, except for rounding::

    with rd.MirroredStrategy(4) as strategy:
        model = rd.ml.LogisticRegression(strategy=strategy).fit(batches)
    model.predict(X)
"""

from __future__ import annotations

from raydist.ml.classifiers import LinearSVC as LinearSVC
from raydist.ml.classifiers import LogisticRegression as LogisticRegression
from raydist.ml.forest import RandomForestClassifier as RandomForestClassifier
from raydist.ml.forest import RandomForestRegressor as RandomForestRegressor
from raydist.ml.kmeans import KMeans as KMeans
from raydist.ml.linear import LinearRegression as LinearRegression
from raydist.ml.linear import Ridge as Ridge
from raydist.ml.mixture import GaussianMixture as GaussianMixture
from raydist.ml.sdca import SDCAClassifier as SDCAClassifier
from raydist.ml.wals import WALS as WALS

__all__ = [
    "WALS",
    "GaussianMixture",
    "KMeans",
    "LinearRegression",
    "LinearSVC",
    "LogisticRegression",
    "RandomForestClassifier",
    "RandomForestRegressor",
    "Ridge",
    "SDCAClassifier",
]
