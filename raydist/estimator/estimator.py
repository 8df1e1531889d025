"""`rd.Estimator`: training, evaluation and prediction from a directory of checkpoints, on `rd.Model`.

Each call builds its model anew, in the scope of its strategy, and gives it the values of a checkpoint: what an
estimator knows is in its directory.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import tempfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, final

import torch
from torch.utils.data import DataLoader

from raydist.checkpoints.checkpoint import Checkpoint
from raydist.checkpoints.listing import latest_checkpoint
from raydist.checkpoints.random_state import random_states, set_random_states
from raydist.context.current import StepCounter
from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.nest import flatten, map_structure, unflatten
from raydist.core.values import INFINITE_CARDINALITY, InputContext
from raydist.dataset import Dataset
from raydist.estimator.model_fn_module import ModelFnModule
from raydist.estimator.spec import EstimatorSpec, ModeKeys, RunConfig
from raydist.pipelines.formats.files import local_path, path_text
from raydist.strategies.functions import get_strategy
from raydist.strategies.one_device import OneDeviceStrategy
from raydist.summary.scalars import scalar
from raydist.summary.writer import create_file_writer
from raydist.training.callbacks.step_hooks import (
    CheckpointSaverHook,
    LoggingTensorHook,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
)
from raydist.training.elements import inputs_of
from raydist.training.evaluation import MAX_UNREAD
from raydist.training.fit_checkpoints import FitState
from raydist.training.model import Model
from raydist.training.passes import in_evaluation_mode, opened, require_at_least

if TYPE_CHECKING:
    from raydist.checkpoints.saves import SaveHandle
    from raydist.context.strategy import Strategy
    from raydist.distributed_dataset import DistributedDataset
    from raydist.feature.feature_space import FeatureSpace
    from raydist.training.callbacks.callback import Callback

_SAMPLE_ROWS = 2


class EstimatorBase(ABC):
    """The methods of all estimators.

    Attributes:
        config: The settings, with `model_dir`.
        params: The parameters of the model_fn.
    """

    def __init__(self, model_dir: str | os.PathLike[str] | None, config: RunConfig | None) -> None:
        config = RunConfig() if config is None else config
        given = {path_text(each) for each in (model_dir, config.model_dir) if each is not None}
        if len(given) > 1:
            raise InvalidArgumentError(f"Give one model_dir, got {model_dir!r} and RunConfig's {config.model_dir!r}.")
        self.config = replace(config, model_dir=next(iter(given), None) or tempfile.mkdtemp())
        self.params: Mapping[str, Any] = {}

    @property
    def model_dir(self) -> str:
        """The directory of checkpoints and summaries; a new temporary one if none was given.

        Source: tf.estimator.Estimator.model_dir.
        """
        return str(self.config.model_dir)

    @abstractmethod
    def _make_model(self, mode: ModeKeys, sample: Any) -> Model:
        """Return the model for a mode, compiled unless for `PREDICT`. `sample` has two rows of the data."""

    def _prepare(self, dataset: Dataset, mode: ModeKeys) -> Dataset:
        """Return the dataset with elements as the model takes them."""
        return dataset

    def _feature_space(self) -> FeatureSpace | None:
        """Return the space that makes the model's inputs of features, if there is one."""
        return None

    def _finish(self, predictions: Any) -> Any:
        """Return the predictions of a batch with those that are made on the driver."""
        return predictions

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Sequence[Callback] = (),
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[Callable[[SaveHandle], object]] = (),
    ) -> Self:
        """Train from the newest checkpoint in `model_dir`, or from the beginning, and save checkpoints there. Blocks.

        After an interrupted training this goes on with the batch after the last saved one: parameters are those of an
        undisturbed training. After a training that ended, the data begin anew.

        Args:
            input_fn: Returns an `rd.Dataset` or DataLoader of (features, labels), batched by the global batch size. It
                may take `mode`, `config` and `params`. If it takes `input_context`, it is called for each worker with
                an `rd.InputContext`, and its batches are those of one replica.
            hooks: Callbacks.
            steps: Number of steps to train; an interrupted training's are completed. None: to the end of the data.
            max_steps: Global step to train to; nothing happens if it is reached.
            saving_listeners: Functions that are called with the :class:`SaveHandle` of each checkpoint.

        Raises:
            InvalidArgumentError: Both `steps` and `max_steps` are given, or one is < 1.
            SpecError: `input_fn` returned something else.

        Source: tf.estimator.Estimator.train.
        """
        if steps is not None and max_steps is not None:
            raise InvalidArgumentError(f"Give steps or max_steps, got {steps!r} and {max_steps!r}.")
        require_at_least("steps", steps)
        require_at_least("max_steps", max_steps)
        saver = next((each for each in hooks if isinstance(each, CheckpointSaverHook)), None)
        own = [self._saver()] if saver is None else []
        saver = saver or own[0]
        path = latest_checkpoint(saver.directory)
        step, ended = (0, True) if path is None else _progress(path)
        if max_steps is not None and step >= max_steps:
            return self
        if self.config.tf_random_seed is not None:
            torch.manual_seed(self.config.tf_random_seed)
        model, data = self._open(input_fn, ModeKeys.TRAIN, self.config.train_distribute or get_strategy())
        model.strategy._make_counter().value.fill_(step)
        if ended and path is not None:
            objects = model.checkpoint_objects()
            Checkpoint(**objects).restore(path, only=list(objects))
        limit = [] if steps is None and max_steps is None else [StopAtStepHook(steps, max_steps)]
        endless = sys.maxsize if data.cardinality() == INFINITE_CARDINALITY else None
        callbacks = [*hooks, *limit, *self._reporting_hooks(), *own]
        with saver._during_training(resume=not ended, listeners=saving_listeners):
            model.fit(data, steps_per_epoch=endless, callbacks=callbacks, verbose=False)
        return self

    def _saver(self) -> CheckpointSaverHook:
        config = self.config
        secs, steps = config.save_checkpoints_secs, config.save_checkpoints_steps
        return CheckpointSaverHook(self.model_dir, secs, steps, config.keep_checkpoint_max)

    def _reporting_hooks(self) -> list[Callback]:
        log, save = self.config.log_step_count_steps, self.config.save_summary_steps
        is_local = local_path(self.model_dir) is not None
        hooks: list[Callback] = [] if log is None else [LoggingTensorHook(["loss"], log)]
        if log is not None and is_local:
            hooks.append(StepCounterHook(log, output_dir=self.model_dir))
        if save is not None and is_local:
            hooks.append(SummarySaverHook(save, output_dir=self.model_dir))
        return hooks

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Sequence[Callback] = (),
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Return loss and metrics of a checkpoint, and write them into `model_dir/eval` for TensorBoard. Blocks.

        Random generators of the driver are left as they were.

        Args:
            input_fn: Gives the data, as for :meth:`train`.
            steps: Largest number of batches; None: all.
            hooks: Callbacks, whose `on_test_...` hooks are called.
            checkpoint_path: The checkpoint; None: the newest one. Without any the model has its first values.
            name: The directory of the curves is `model_dir/eval_<name>`.

        Returns:
            Name -> value: "loss", each metric, and "global_step".

        Raises:
            InvalidArgumentError: The checkpoint does not fit the model.

        Source: tf.estimator.Estimator.evaluate.
        """
        require_at_least("steps", steps)
        before = random_states()
        model, step, data = self._restored(input_fn, ModeKeys.EVAL, checkpoint_path, steps)
        results = model.evaluate(data, callbacks=hooks, verbose=False)
        set_random_states(before)
        self._write_curves(results, step, "eval" if name is None else f"eval_{name}")
        return {**results, "global_step": step}

    def _write_curves(self, results: Mapping[str, Any], step: int, folder: str) -> None:
        if local_path(self.model_dir) is None:
            return
        with create_file_writer(os.path.join(self.model_dir, folder)) as writer, writer.as_default():
            for name, value in results.items():
                if isinstance(value, int | float):
                    scalar(name, value, step=step)

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Sequence[str] | str | None = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Yield the predictions of each row as CPU tensors, in the order of the data, while later ones are computed.

        Args:
            input_fn: Gives the data: features, or (features, labels), whose labels are not used.
            predict_keys: Names of predictions; None: all.
            checkpoint_path: The checkpoint; None: the newest one. Without any the model has its first values.
            yield_single_examples: False: yield the predictions of a batch together.

        Raises:
            InvalidArgumentError: A name in `predict_keys` is none of the predictions'.
            SpecError: A prediction does not have one entry for each row.

        Source: tf.estimator.Estimator.predict.
        """
        before = random_states()
        model, _, data = self._restored(input_fn, ModeKeys.PREDICT, checkpoint_path, None)
        set_random_states(before)
        for outputs in _predicted(model, data):
            batch = self._finish(outputs)
            if predict_keys is not None:
                batch = _chosen(batch, [predict_keys] if isinstance(predict_keys, str) else predict_keys)
            if not yield_single_examples:
                yield batch
                continue
            leaves, structure = flatten(batch)
            for row in zip(*leaves, strict=True):
                yield unflatten(structure, list(row))

    def export_saved_model(
        self, export_dir_base: str | os.PathLike[str], example_inputs: Any, checkpoint_path: str | None = None
    ) -> str:
        """Write the predictions of a checkpoint as a new version; see `Model.export`. Blocks.

        Args:
            export_dir_base: Directory of the versions.
            example_inputs: Features of a batch, as `input_fn` gives them; of canned estimators a dict of raw features.
            checkpoint_path: The checkpoint; None: the newest one.

        Returns:
            The path of the version.

        Source: tf.estimator.Estimator.export_saved_model.
        """
        space, before = self._feature_space(), random_states()
        sample = example_inputs if space is None else space.transform(example_inputs, batched=True)
        with OneDeviceStrategy("cpu").scope():
            model = self._make_model(ModeKeys.PREDICT, map_structure(torch.as_tensor, sample))
        self._restore(model, checkpoint_path)
        set_random_states(before)
        return model.export(export_dir_base, example_inputs, space)

    def latest_checkpoint(self) -> str | None:
        """Return the path of the newest checkpoint in `model_dir`; None if there is none.

        Source: tf.estimator.Estimator.latest_checkpoint.
        """
        return latest_checkpoint(self.model_dir)

    def _restored(
        self, input_fn: Callable[..., Any], mode: ModeKeys, path: str | None, steps: int | None
    ) -> tuple[Model, int, DistributedDataset]:
        """Return the model with the values of a checkpoint, the checkpoint's global step, and the data."""
        strategy = self.config.eval_distribute or self.config.train_distribute or get_strategy()
        model, data = self._open(input_fn, mode, strategy, steps)
        return model, self._restore(model, path), data

    def _restore(self, model: Model, path: str | None) -> int:
        """Give a model the values of a checkpoint; return the checkpoint's global step."""
        path = path or self.latest_checkpoint()
        counter = StepCounter()
        if path is not None:
            checkpoint = Checkpoint(model=model.module, fit={"global_step": counter})
            checkpoint.restore(path, only=["model", "fit.global_step"])
        return int(counter.value)

    def _open(
        self, input_fn: Callable[..., Any], mode: ModeKeys, strategy: Strategy, steps: int | None = None
    ) -> tuple[Model, DistributedDataset]:
        """Return a new model and the distributed data, of at most `steps` batches."""
        given = {"mode": mode, "config": self.config, "params": self.params}

        def dataset_of(context: InputContext) -> Dataset:
            found = input_fn(**arguments_for(input_fn, {**given, "input_context": context}))
            if isinstance(found, DataLoader):
                found = Dataset.from_torch(found)
            if not isinstance(found, Dataset):
                raise SpecError(
                    f"input_fn must return an rd.Dataset of batches or a DataLoader, got {type(found).__name__}. "
                    "Arrays: rd.Dataset.from_tensor_slices((features, labels)).batch(n)."
                )
            found = self._prepare(found, mode)
            return found if steps is None else found.take(steps)

        first = dataset_of(InputContext(num_replicas_in_sync=strategy.num_replicas_in_sync))
        with contextlib.closing(iter(first.take(1))) as iterator:
            sample = next(iterator, None)
        if sample is None:
            raise InvalidArgumentError("The dataset of input_fn must have at least one batch, got none.")
        sample = inputs_of(sample) if mode is ModeKeys.PREDICT else sample
        with strategy.scope():
            model = self._make_model(mode, map_structure(lambda leaf: leaf[:_SAMPLE_ROWS], sample))
        data: DistributedDataset
        if "input_context" in inspect.signature(input_fn).parameters:
            data = strategy.distribute_datasets_from_function(dataset_of)
        else:
            data = strategy.distribute_dataset(first)
        return model, data


@final
class Estimator(EstimatorBase):
    """A model given by a function, with its training, evaluation and prediction, and a directory for its checkpoints.

    `model_fn(features, labels, mode, params, config)` makes its modules and optimizers by :func:`raydist.get_or_create`
    and returns an :class:`raydist.EstimatorSpec`; it may leave out parameters but the first. It runs on each replica,
    with the replica's rows. Modules are in training mode in `TRAIN` only.

    Args:
        model_fn: The function.
        model_dir: Directory of checkpoints and summaries; None: that of `config`, or a new temporary directory.
        config: The settings.
        params: Passed to `model_fn`, as a dict.

    Source: tf.estimator.Estimator.

    >>> import torch
    >>> from torch.nn import functional as F
    >>> def model_fn(features, labels, mode, params):
    ...     net = rd.get_or_create("net", lambda: torch.nn.Linear(1, 1))
    ...     outputs = net(features)
    ...     if mode == rd.ModeKeys.PREDICT:
    ...         return rd.EstimatorSpec(mode, predictions=outputs)
    ...     sgd = rd.get_or_create("sgd", lambda: torch.optim.SGD(net.parameters(), lr=params["lr"]))
    ...     return rd.EstimatorSpec(mode, loss=F.mse_loss(outputs, labels), optimizer=sgd)
    >>> x = torch.arange(8.0)[:, None]
    >>> data = rd.Dataset.from_tensor_slices((x, 2 * x)).batch(4)
    >>> estimator = rd.Estimator(model_fn, params={"lr": 0.01}).train(lambda: data.repeat(3))
    >>> estimator.evaluate(lambda: data)["global_step"]
    6
    >>> [row.shape for row in estimator.predict(lambda: data.take(1))]
    [torch.Size([1]), torch.Size([1]), torch.Size([1]), torch.Size([1])]
    """

    def __init__(
        self,
        model_fn: Callable[..., EstimatorSpec],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(model_fn):
            raise InvalidArgumentError(f"model_fn must be a function that returns an EstimatorSpec, got {model_fn!r}.")
        super().__init__(model_dir, config)
        self._model_fn = model_fn
        self.params = dict(params or {})

    def _make_model(self, mode: ModeKeys, sample: Any) -> Model:
        return model_of_function(self._model_fn, mode, sample, self.config, self.params)


def model_of_function(
    model_fn: Callable[..., EstimatorSpec], mode: ModeKeys, sample: Any, config: RunConfig, params: Mapping[str, Any]
) -> Model:
    """Return the model of a model_fn for a mode. Call this in the scope of the strategy."""
    there = replace(config, train_distribute=None, eval_distribute=None)  # strategies stay on the driver
    given = arguments_for(model_fn, {"mode": mode, "params": dict(params), "config": there})
    module = ModelFnModule(model_fn, mode, given, takes_labels=bool(arguments_for(model_fn, {"labels": None})))
    spec = module.build(sample)
    model = Model(module)
    trains = mode is ModeKeys.TRAIN
    if mode is not ModeKeys.PREDICT:
        model.compile(
            (spec.optimizer or ()) if trains else (),
            "model",
            metrics={} if trains else {name: metric for name, (metric, *_) in spec.eval_metric_ops.items()},
            scheduler=spec.scheduler if trains else None,
            clip_norm=spec.clip_norm,
            loss_reduction=spec.loss_reduction,
        )
    return model


def arguments_for(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for which a function has parameters.

    >>> arguments_for(lambda features, mode: None, {"mode": "train", "params": {}})
    {'mode': 'train'}
    """
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    names = {each.name for each in parameters}
    return {name: value for name, value in given.items() if takes_all or name in names}


def _progress(path: str) -> tuple[int, bool]:
    """Return the global step of a checkpoint, and True if the training had ended."""
    counter, state = StepCounter(), FitState()
    parts = {"global_step": counter, "state": state}
    Checkpoint(fit=parts).restore(path, only=[f"fit.{name}" for name in parts])
    return int(counter.value), state.stop or state.epoch > 0


def _predicted(model: Model, data: DistributedDataset) -> Iterator[Any]:
    """Yield the predictions of each batch."""
    strategy, step, unread = model.strategy, model._prediction_step(), deque[Any]()
    with in_evaluation_mode(model.module), opened(data) as iterator:
        for batch in iterator:
            unread.append(strategy.run(step, args=(batch,)))
            if len(unread) > MAX_UNREAD:
                yield strategy.gather(unread.popleft())
        while unread:
            yield strategy.gather(unread.popleft())


def _chosen(batch: Any, names: Sequence[str]) -> dict[str, Any]:
    known = list(batch) if isinstance(batch, dict) else []
    if unknown := [name for name in names if name not in known]:
        raise InvalidArgumentError(f"predict_keys must be among the predictions {known}, got {unknown[0]!r}.")
    return {name: batch[name] for name in names}
