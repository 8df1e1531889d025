"""`rd.train_and_evaluate`, and `rd.model_to_estimator`."""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.estimator.estimator import EstimatorBase
from raydist.estimator.spec import EvalSpec, ModeKeys, RunConfig, TrainSpec
from raydist.training.model import Model
from raydist.training.trackers import LossTotal, RowCount, Trackers
from raydist.training.updates import Update

if TYPE_CHECKING:
    from raydist.checkpoints.saves import SaveHandle


def train_and_evaluate(estimator: EstimatorBase, train_spec: TrainSpec, eval_spec: EvalSpec) -> dict[str, Any]:
    """Train an estimator, evaluate its checkpoints as they are saved, and return the results for the last one. Blocks.

    Training waits for each evaluation. A program that was interrupted goes on when it is run again: the parameters are
    those of an undisturbed run.

    Args:
        estimator: The estimator.
        train_spec: The training.
        eval_spec: The evaluations.

    Source: tf.estimator.train_and_evaluate.

    >>> data = rd.Dataset.from_tensor_slices(({"x": [1.0, 2.0]}, [2.0, 4.0])).batch(2)
    >>> estimator = rd.LinearRegressor([rd.feature.numeric_column("x")])
    >>> train_spec, eval_spec = rd.TrainSpec(data.repeat, max_steps=10), rd.EvalSpec(lambda: data)
    >>> rd.train_and_evaluate(estimator, train_spec, eval_spec)["global_step"]
    10
    """
    evaluations = _Evaluations(estimator, eval_spec)
    spec = train_spec
    estimator.train(spec.input_fn, spec.hooks, max_steps=spec.max_steps, saving_listeners=[evaluations.after_save])
    return evaluations.of_newest()


@final
class _Evaluations:
    """The evaluations of checkpoints, at most one in `throttle_secs`."""

    def __init__(self, estimator: EstimatorBase, spec: EvalSpec) -> None:
        self._estimator = estimator
        self._spec = spec
        self._began = -math.inf
        self._path = ""
        self._results: dict[str, Any] = {}

    def after_save(self, handle: SaveHandle) -> None:
        """Evaluate the checkpoint that is being saved, if one is due."""
        if handle.path != self._path and time.monotonic() - self._began >= self._spec.throttle_secs:
            handle.wait()
            self._evaluate(handle.path)

    def of_newest(self) -> dict[str, Any]:
        """Return the results for the newest checkpoint."""
        path = self._estimator.latest_checkpoint()
        if path is None:
            raise FailedPreconditionError("There must be a checkpoint after training, got none. Was it removed?")
        if path != self._path:
            self._evaluate(path)
        return self._results

    def _evaluate(self, path: str) -> None:
        spec = self._spec
        self._began, self._path = time.monotonic(), path
        self._results = self._estimator.evaluate(spec.input_fn, spec.steps, spec.hooks, path, spec.name)


def model_to_estimator(
    model: Model, model_dir: str | os.PathLike[str] | None = None, config: RunConfig | None = None
) -> EstimatorBase:
    """Return an estimator of a compiled model. Elements of its data are those of `Model.fit`.

    The estimator uses the model itself, on its strategy, and begins with its values.

    Args:
        model: The compiled model.
        model_dir: Directory of checkpoints and summaries; see :class:`raydist.Estimator`.
        config: The settings, without strategies.

    Returns:
        The estimator. A single output is predicted under the name "predictions".

    Source: tf.keras.estimator.model_to_estimator.

    >>> import torch
    >>> model = rd.Model(torch.nn.Linear(1, 1))
    >>> model.compile("sgd", "mse")
    >>> estimator = rd.model_to_estimator(model)
    """
    return _ModelEstimator(model, model_dir, config)


@final
class _ModelEstimator(EstimatorBase):
    """An estimator of an `rd.Model`."""

    def __init__(self, model: Model, model_dir: str | os.PathLike[str] | None, config: RunConfig | None) -> None:
        super().__init__(model_dir, config)
        if self.config.train_distribute is not None or self.config.eval_distribute is not None:
            raise InvalidArgumentError(
                f"The model is one of its {type(model.strategy).__name__}, so that RunConfig must not name a strategy. "
                "Make the model under the scope of the strategy."
            )
        self._model, self._compiled = model, model._trainee().compiled
        self.config = replace(self.config, train_distribute=model.strategy)

    def _make_model(self, mode: ModeKeys, sample: Any) -> Model:
        if mode is not ModeKeys.EVAL:
            return self._model
        # An evaluation during the training must not count into the counters of the training.
        compiled, evaluated = self._compiled, Model(self._model.module)
        metrics = {name: copy.deepcopy(metric) for name, metric in compiled.trackers.metrics.items()}
        trackers = Trackers(LossTotal(is_sum=compiled.loss_kind == "sum"), RowCount(), metrics)
        evaluated._compiled = replace(compiled, update=Update(()), trackers=trackers)
        return evaluated

    def _finish(self, predictions: Any) -> Any:
        return predictions if isinstance(predictions, Mapping) else {"predictions": predictions}
