"""Canned estimators: linear models, networks of dense layers, and both together, over feature columns."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, final

from torch.nn import functional as F

from raydist.core.errors import InvalidArgumentError
from raydist.dataset import Dataset
from raydist.estimator.canned_model import (
    Activation,
    CannedModelFn,
    Columns,
    OptimizerChoice,
    Part,
    Preparation,
    Reduction,
)
from raydist.estimator.estimator import EstimatorBase, model_of_function
from raydist.estimator.heads import ClassHead, Head, RegressionHead
from raydist.estimator.spec import ModeKeys, RunConfig
from raydist.feature.columns import NumericColumn
from raydist.feature.feature_space import FeatureSpace
from raydist.training.model import Model

Directory = str | os.PathLike[str] | None


class CannedEstimator(EstimatorBase):
    """The methods of all canned estimators."""

    def __init__(
        self,
        model_dir: Directory,
        config: RunConfig | None,
        head: Head,
        parts: Mapping[str, Part],
        weight_column: str | NumericColumn | None,
        loss_reduction: Reduction,
    ) -> None:
        super().__init__(model_dir, config)
        columns = [column for part in parts.values() for column in part.columns]
        if loss_reduction not in ("sum_over_batch_size", "sum"):
            raise InvalidArgumentError(f"loss_reduction must be sum_over_batch_size or sum, got {loss_reduction!r}.")
        self._head = head
        self._space = FeatureSpace([column for at, column in enumerate(columns) if column not in columns[:at]])
        weights = NumericColumn(weight_column) if isinstance(weight_column, str) else weight_column
        self._weights = None if weights is None else FeatureSpace([weights])
        self._model_fn = CannedModelFn(head, parts, loss_reduction)

    def _make_model(self, mode: ModeKeys, sample: Any) -> Model:
        return model_of_function(self._model_fn, mode, sample, self.config, {})

    def _prepare(self, dataset: Dataset, mode: ModeKeys) -> Dataset:
        return dataset.map(Preparation(self._space, self._head, self._weights, mode is ModeKeys.PREDICT))

    def _feature_space(self) -> FeatureSpace:
        return self._space

    def _finish(self, predictions: Any) -> Any:
        if not isinstance(self._head, ClassHead):
            return predictions
        return {**predictions, "classes": self._head.named_classes(predictions["class_ids"])}


class Classifier(CannedEstimator):
    """An estimator of classes, over features of :mod:`raydist.feature`.

    Data are (features, labels): a dict of features as `FeatureSpace.transform` takes them, and labels (rows,) or
    (rows, 1). Predictions are "logits", "probabilities", "class_ids", "classes", and of two classes "logistic".

    Args:
        model_dir: Directory of checkpoints and summaries; see :class:`raydist.Estimator`.
        n_classes: Number of classes. Labels are 0 to n_classes - 1, unless there is a vocabulary.
        weight_column: The feature with the weights of rows: its name, or a numeric column.
        label_vocabulary: The labels of the classes, in order.
        config: The settings.
        loss_reduction: "sum_over_batch_size": the sum of the (weighted) losses divided by the rows; or "sum".
    """


class Regressor(CannedEstimator):
    """An estimator of numbers by the mean squared error, over features of :mod:`raydist.feature`.

    Data are (features, labels): a dict of features as `FeatureSpace.transform` takes them, and labels (rows,) or
    (rows, label_dimension). Predictions are "predictions".

    Args:
        model_dir: Directory of checkpoints and summaries; see :class:`raydist.Estimator`.
        label_dimension: Numbers of a row.
        weight_column: The feature with the weights of rows: its name, or a numeric column.
        config: The settings.
        loss_reduction: "sum_over_batch_size": the sum of the (weighted) losses divided by the rows; or "sum".
    """


@final
class LinearClassifier(Classifier):
    """A linear model of classes. Further arguments are those of all classifiers; see the page "Estimators".

    Args:
        feature_columns: Columns as for `rd.LinearModel`, adapted.
        optimizer: "Ftrl", with the learning rate min(0.2, 1 / sqrt(number of columns)), "Adagrad", "Adam", "RMSProp",
            "SGD", or a function that makes an optimizer of parameters.
        sparse_combiner: How several ids of a row are combined: "sum", "mean" or "sqrtn".

    Source: tf.estimator.LinearClassifier.

    >>> people = rd.Dataset.from_tensor_slices(({"age": [20.0, 60.0]}, ["no", "yes"])).batch(2).repeat(200)
    >>> age = rd.feature.numeric_column("age", normalizer_fn=lambda age: age / 40 - 1)
    >>> classifier = rd.LinearClassifier([age], label_vocabulary=["no", "yes"]).train(lambda: people)
    >>> [row["classes"].tolist() for row in classifier.predict(lambda: people.take(1))]
    [['no'], ['yes']]
    """

    def __init__(
        self,
        feature_columns: Columns,
        model_dir: Directory = None,
        n_classes: int = 2,
        weight_column: str | NumericColumn | None = None,
        label_vocabulary: Sequence[Any] | None = None,
        optimizer: OptimizerChoice = "Ftrl",
        config: RunConfig | None = None,
        loss_reduction: Reduction = "sum_over_batch_size",
        sparse_combiner: str = "sum",
    ) -> None:
        parts = {"linear": Part.linear(feature_columns, optimizer, sparse_combiner)}
        head = ClassHead(n_classes, label_vocabulary)
        super().__init__(model_dir, config, head, parts, weight_column, loss_reduction)


@final
class LinearRegressor(Regressor):
    """A linear model of numbers. Further arguments are those of all regressors; see the page "Estimators".

    Args:
        feature_columns: Columns as for `rd.LinearModel`, adapted.
        optimizer: As for :class:`LinearClassifier`.
        sparse_combiner: How several ids of a row are combined: "sum", "mean" or "sqrtn".

    Source: tf.estimator.LinearRegressor.

    >>> regressor = rd.LinearRegressor([rd.feature.numeric_column("x")], optimizer="SGD")
    """

    def __init__(
        self,
        feature_columns: Columns,
        model_dir: Directory = None,
        label_dimension: int = 1,
        weight_column: str | NumericColumn | None = None,
        optimizer: OptimizerChoice = "Ftrl",
        config: RunConfig | None = None,
        loss_reduction: Reduction = "sum_over_batch_size",
        sparse_combiner: str = "sum",
    ) -> None:
        parts = {"linear": Part.linear(feature_columns, optimizer, sparse_combiner)}
        head = RegressionHead(label_dimension)
        super().__init__(model_dir, config, head, parts, weight_column, loss_reduction)


@final
class DNNClassifier(Classifier):
    """Dense layers to logits of classes. Further arguments are those of all classifiers; see the page "Estimators".

    Args:
        hidden_units: Sizes of the hidden layers.
        feature_columns: Columns as for `rd.DenseFeatures`, adapted.
        optimizer: "Adagrad", with the learning rate 0.05 and 0.1 as first sums, or another; see
            :class:`LinearClassifier`.
        activation_fn: The function after each hidden layer.
        dropout: Share of a hidden layer's results that is dropped in training.

    Source: tf.estimator.DNNClassifier.

    >>> classifier = rd.DNNClassifier([16], [rd.feature.numeric_column("pixels", 64)], n_classes=10)
    """

    def __init__(
        self,
        hidden_units: Sequence[int],
        feature_columns: Columns,
        model_dir: Directory = None,
        n_classes: int = 2,
        weight_column: str | NumericColumn | None = None,
        label_vocabulary: Sequence[Any] | None = None,
        optimizer: OptimizerChoice = "Adagrad",
        activation_fn: Activation = F.relu,
        dropout: float | None = None,
        config: RunConfig | None = None,
        loss_reduction: Reduction = "sum_over_batch_size",
    ) -> None:
        parts = {"dnn": Part.dnn(feature_columns, optimizer, hidden_units, activation_fn, dropout)}
        head = ClassHead(n_classes, label_vocabulary)
        super().__init__(model_dir, config, head, parts, weight_column, loss_reduction)


@final
class DNNRegressor(Regressor):
    """Dense layers to numbers. Further arguments are those of all regressors; see the page "Estimators".

    Args:
        hidden_units: Sizes of the hidden layers.
        feature_columns: Columns as for `rd.DenseFeatures`, adapted.
        optimizer: As for :class:`DNNClassifier`.
        activation_fn: The function after each hidden layer.
        dropout: Share of a hidden layer's results that is dropped in training.

    Source: tf.estimator.DNNRegressor.

    >>> regressor = rd.DNNRegressor([16, 8], [rd.feature.numeric_column("x", 3)], label_dimension=2)
    """

    def __init__(
        self,
        hidden_units: Sequence[int],
        feature_columns: Columns,
        model_dir: Directory = None,
        label_dimension: int = 1,
        weight_column: str | NumericColumn | None = None,
        optimizer: OptimizerChoice = "Adagrad",
        activation_fn: Activation = F.relu,
        dropout: float | None = None,
        config: RunConfig | None = None,
        loss_reduction: Reduction = "sum_over_batch_size",
    ) -> None:
        parts = {"dnn": Part.dnn(feature_columns, optimizer, hidden_units, activation_fn, dropout)}
        head = RegressionHead(label_dimension)
        super().__init__(model_dir, config, head, parts, weight_column, loss_reduction)


def _both(
    wide: Columns | None, optimizer: OptimizerChoice, combiner: str, deep: Columns | None, how: tuple[Any, ...]
) -> dict[str, Part]:
    if not (wide or deep):
        raise InvalidArgumentError(f"Give linear_feature_columns, dnn_feature_columns or both, got {wide!r}, {deep!r}.")
    parts = {"linear": Part.linear(wide, optimizer, combiner, most=0.005)} if wide else {}
    return {**parts, **({"dnn": Part.dnn(deep, *how, rate=0.001)} if deep else {})}


@final
class DNNLinearCombinedClassifier(Classifier):
    """A wide and deep model of classes: a linear model and dense layers, whose logits are added up, trained together.

    Further arguments are those of all classifiers; see the page "Estimators".

    Args:
        linear_feature_columns: Columns as for `rd.LinearModel`, adapted; None: no linear part.
        linear_optimizer: "Ftrl", with the learning rate min(0.005, 1 / sqrt(number of columns)), or another; see
            :class:`LinearClassifier`.
        dnn_feature_columns: Columns as for `rd.DenseFeatures`, adapted; None: no dense layers.
        dnn_optimizer: "Adagrad", with the learning rate 0.001 and 0.1 as first sums, or another.
        dnn_hidden_units: Sizes of the hidden layers.
        dnn_activation_fn: The function after each hidden layer.
        dnn_dropout: Share of a hidden layer's results that is dropped in training.
        linear_sparse_combiner: How several ids of a row are combined: "sum", "mean" or "sqrtn".

    Source: tf.estimator.DNNLinearCombinedClassifier.

    >>> job = rd.feature.categorical_column_with_hash_bucket("job", 100)
    >>> deep = [rd.feature.numeric_column("age"), rd.feature.embedding_column(job, 8)]
    >>> classifier = rd.DNNLinearCombinedClassifier(
    ...     linear_feature_columns=[job], dnn_feature_columns=deep, dnn_hidden_units=[16]
    ... )
    """

    def __init__(
        self,
        model_dir: Directory = None,
        linear_feature_columns: Columns | None = None,
        linear_optimizer: OptimizerChoice = "Ftrl",
        dnn_feature_columns: Columns | None = None,
        dnn_optimizer: OptimizerChoice = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: Activation = F.relu,
        dnn_dropout: float | None = None,
        n_classes: int = 2,
        weight_column: str | NumericColumn | None = None,
        label_vocabulary: Sequence[Any] | None = None,
        config: RunConfig | None = None,
        linear_sparse_combiner: str = "sum",
        loss_reduction: Reduction = "sum_over_batch_size",
    ) -> None:
        how = (dnn_optimizer, dnn_hidden_units, dnn_activation_fn, dnn_dropout)
        parts = _both(linear_feature_columns, linear_optimizer, linear_sparse_combiner, dnn_feature_columns, how)
        head = ClassHead(n_classes, label_vocabulary)
        super().__init__(model_dir, config, head, parts, weight_column, loss_reduction)


@final
class DNNLinearCombinedRegressor(Regressor):
    """A wide and deep model of numbers; see :class:`DNNLinearCombinedClassifier`.

    Further arguments are those of all regressors; see the page "Estimators".

    Args:
        linear_feature_columns: Columns as for `rd.LinearModel`, adapted; None: no linear part.
        linear_optimizer: As for :class:`DNNLinearCombinedClassifier`.
        dnn_feature_columns: Columns as for `rd.DenseFeatures`, adapted; None: no dense layers.
        dnn_optimizer: As for :class:`DNNLinearCombinedClassifier`.
        dnn_hidden_units: Sizes of the hidden layers.
        dnn_activation_fn: The function after each hidden layer.
        dnn_dropout: Share of a hidden layer's results that is dropped in training.
        linear_sparse_combiner: How several ids of a row are combined: "sum", "mean" or "sqrtn".

    Source: tf.estimator.DNNLinearCombinedRegressor.

    >>> size = rd.feature.numeric_column("size")
    >>> regressor = rd.DNNLinearCombinedRegressor(
    ...     linear_feature_columns=[size], dnn_feature_columns=[size], dnn_hidden_units=[16]
    ... )
    """

    def __init__(
        self,
        model_dir: Directory = None,
        linear_feature_columns: Columns | None = None,
        linear_optimizer: OptimizerChoice = "Ftrl",
        dnn_feature_columns: Columns | None = None,
        dnn_optimizer: OptimizerChoice = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: Activation = F.relu,
        dnn_dropout: float | None = None,
        label_dimension: int = 1,
        weight_column: str | NumericColumn | None = None,
        config: RunConfig | None = None,
        linear_sparse_combiner: str = "sum",
        loss_reduction: Reduction = "sum_over_batch_size",
    ) -> None:
        how = (dnn_optimizer, dnn_hidden_units, dnn_activation_fn, dnn_dropout)
        parts = _both(linear_feature_columns, linear_optimizer, linear_sparse_combiner, dnn_feature_columns, how)
        head = RegressionHead(label_dimension)
        super().__init__(model_dir, config, head, parts, weight_column, loss_reduction)
