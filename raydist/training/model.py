"""`Model`: compile, fit, evaluate and predict for any torch module, over any strategy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from raydist.core.errors import InvalidArgumentError
from raydist.core.exception_utils import folded
from raydist.training.callbacks.callback import Callback, CallbackList, History
from raydist.training.callbacks.log_callbacks import progress_stream
from raydist.training.callbacks.profile_batches import ProfileBatches
from raydist.training.compiled_model import CompiledModel
from raydist.training.elements import ClassWeights
from raydist.training.evaluation import Evaluation, Prediction
from raydist.training.export import export_module
from raydist.training.fit import Fit, FitPlan
from raydist.training.fit_checkpoints import FitState, open_checkpoints
from raydist.training.given_data import distributed, held_out_data
from raydist.training.model_file import (
    make_module,
    pack,
    read_model_file,
    rebuild,
    restore_module,
    restore_optimizer,
    write_model_file,
)
from raydist.training.module_passes import is_in_stages
from raydist.training.passes import num_steps, require_at_least
from raydist.training.progress import Reporter, open_view
from raydist.training.steps import Step, prediction_step

if TYPE_CHECKING:
    from raydist.checkpoints.manager import CheckpointManager
    from raydist.dataset import Dataset
    from raydist.distributed_dataset import DistributedDataset
    from raydist.feature import FeatureSpace

    Data = Dataset | DistributedDataset


@final
class Model(CompiledModel):
    """A torch module with `compile`, `fit`, `evaluate` and `predict`, on the strategy in whose scope it is created.

    Losses and metrics equal those of a single replica: the optimised loss is the loss of the *global* batch, and every
    row counts once, independent of the division of rows among replicas. For a module that computes its own loss, as
    Hugging Face models do, use `compile(loss="model")` and datasets of dicts. Save such a module by itself:
    `model.module.save_pretrained(directory)`.

    Elements of datasets are (x, y) or (x, y, sample_weight), batched by the global batch size; arrays and torch
    DataLoaders are accepted as well. The module is called with x, or with the items of x if x is a plain tuple. With
    sample weights the loss is sum(w * loss) / sum(w) over the global batch. Metrics do not see the weights.

    Args:
        module: The module; its parameters are trained in place.
        config: JSON-able keyword arguments of the module's constructor, saved so that `Model.load(path, module=Net)`
            can build the module again.

    >>> import numpy as np, torch, raydist as rd
    >>> x = np.arange(8, dtype=np.float32)[:, None]
    >>> data = rd.Dataset.from_tensor_slices((x, 2 * x)).batch(4)
    >>> with rd.OneDeviceStrategy("cpu").scope():
    ...     model = rd.Model(torch.nn.Linear(1, 1))
    ...     model.compile(torch.optim.SGD(model.parameters(), lr=0.02), torch.nn.MSELoss())
    >>> history = model.fit(data, epochs=3, verbose=False)  # or model.fit(x, 2 * x, batch_size=4, epochs=3)
    >>> len(history.history["loss"]), model.predict(data, verbose=False).shape
    (3, torch.Size([8, 1]))

    Source: keras.Model.

    Attributes:
        stop_training: Set to True in a callback to end `fit` after the current execution.

    Raises:
        InvalidArgumentError: `module` is not a torch.nn.Module instance.
    """

    @folded
    def fit(
        self,
        x: Data | Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        steps_per_epoch: int | None = None,
        validation_data: Data | Any | None = None,
        callbacks: Sequence[Callback] = (),
        *,
        verbose: bool = True,
        shuffle: bool = True,
        initial_epoch: int = 0,
        validation_freq: int | Container[int] = 1,
        validation_steps: int | None = None,
        class_weight: Mapping[int, float] | None = None,
        checkpoint: str | os.PathLike[str] | CheckpointManager | None = None,
        resume: bool = True,
        profile: str | os.PathLike[str] | None = None,
        dataset: Data | None = None,
    ) -> History:
        """Train for several epochs.

        With `compile(loss="model")` an element holds the arguments of the module: a dict of keyword arguments,
        including labels, a tuple of arguments, or a single argument.

        Args:
            x: A dataset, batched by the global batch size; each epoch iterates the dataset again. Or an array, a tensor
                or a nest of them. Or a torch DataLoader with global batches: see `Dataset.from_torch`.
            y: Targets for arrays x; datasets contain their targets.
            batch_size: Rows of a global batch of arrays; None: 32.
            epochs: Number of the last epoch, >= 1, counted from 1.
            steps_per_epoch: Batches per epoch, >= 1; None: all batches. With a number, each epoch continues where the
                previous one ended; if the data ends early, `fit` warns once and stops training.
            validation_data: Data to evaluate after epochs; the names of the results get the prefix "val_". A dataset or
                a DataLoader, or arrays (x, y), in batches of `batch_size`.
            callbacks: Callbacks, called in this order.
            verbose: Show progress: a bar in a terminal, one changing line in a notebook, plain lines in a log.
            shuffle: Shuffle arrays in every epoch, with a seed that follows `torch.manual_seed`. Datasets and
                DataLoaders keep their own order.
            initial_epoch: Number of the first epoch, counted from 0, to continue after an earlier `fit`.
            validation_freq: Epochs between validations, or a container of the epochs to validate, counted from 1.
            validation_steps: Batches of a validation; None: all batches.
            class_weight: Weights of training rows by class number; other classes have weight 1. As with sample weights,
                the loss is sum(w * loss) / sum(w) of losses per row.
            checkpoint: A directory (or a URI that fsspec supports) for checkpoints: one after each epoch, and one on
                preemption; the last 3 are kept. Or a `CheckpointManager` with a checkpoint of your objects: the
                manager decides when to save and how many to keep, and `fit` adds its own state as "fit".
            resume: Resume from the newest checkpoint if there is one, with the batch after the last one in the
                checkpoint. The result is that of an uninterrupted training, including history, metrics, callbacks and
                random numbers. If the checkpoint is from the end of training, `fit` warns and trains nothing.
            profile: A directory for a trace, `trace.json.gz`, of the executions 4 to 8 on every replica; see
                `rd.profile_steps`.
            dataset: Former name of x.

        Returns:
            The history of the logs: `.history["loss"]` has one value per epoch.

        Raises:
            FailedPreconditionError: `compile` was not called.
            InvalidArgumentError: A dataset has no batch or never ends, a number is < 1, arguments are incompatible, or
                a DataLoader has a DistributedSampler; the message says what to write.
            SpecError: Elements are not (x, y) or (x, y, sample_weight).
            UnavailableError: A replica or the input pipeline is gone; the message names it.

        Blocks until all steps are done. An error in user code is raised from this call, with its original type.

        >>> import numpy as np, torch
        >>> x = np.arange(8, dtype=np.float32)[:, None]
        >>> data = rd.Dataset.from_tensor_slices((x, 2 * x)).batch(4)
        >>> with rd.OneDeviceStrategy("cpu").scope():
        ...     model = rd.Model(torch.nn.Linear(1, 1))
        ...     model.compile(torch.optim.SGD(model.parameters(), lr=0.01), torch.nn.MSELoss())
        >>> history = model.fit(data, epochs=2, validation_data=data, verbose=False)
        >>> sorted(history.history)
        ['loss', 'val_loss']

        Source: keras.Model.fit.
        """
        trainee = self._trainee()
        own_loss = trainee.compiled.loss is None
        data = distributed(self._strategy, x, y, batch_size, dataset, own_loss=own_loss, shuffle=shuffle)
        held_out = held_out_data(self._strategy, validation_data, batch_size, own_loss=own_loss)
        weights = ClassWeights.parse(class_weight)
        plan = FitPlan(
            data, epochs, steps_per_epoch, initial_epoch, validation_freq, weights, held_out, validation_steps
        )
        history = History()
        profiler = () if profile is None else (ProfileBatches(profile),)
        hooks = CallbackList((*callbacks, *profiler, history), self, {"epochs": epochs, "steps": plan.total()})
        hooks.call("_set_data", data)
        state = FitState((*callbacks, history), held_out)
        objects = self.checkpoint_objects()
        if not self._module.training:
            self._module.train()
        with contextlib.ExitStack() as stack:
            for each in profiler:
                stack.callback(each.close)
            view = stack.enter_context(open_view(*progress_stream(callbacks, verbose=verbose)))
            checkpoints = open_checkpoints(
                checkpoint, callbacks, trainee, objects, data, state, resume=resume, stack=stack
            )
            Fit(trainee, plan, model=self, callbacks=hooks, view=view, state=state, checkpoints=checkpoints).run()
        return history

    @folded
    def evaluate(
        self,
        x: Data | Any = None,
        y: Any = None,
        batch_size: int | None = None,
        callbacks: Sequence[Callback] = (),
        *,
        verbose: bool = True,
        steps: int | None = None,
        dataset: Data | None = None,
    ) -> dict[str, Any]:
        """Return loss and metrics over a dataset, with the module in evaluation mode. Blocks until all steps are done.

        Args:
            x: A dataset batched by the global batch size, with elements as for :meth:`fit`; or arrays, or a DataLoader.
            y: Targets for arrays x.
            batch_size: Rows of a global batch of arrays; None: 32.
            callbacks: Callbacks whose `on_test_...` hooks are called.
            verbose: Show progress, as in :meth:`fit`.
            steps: Number of batches; None: all batches. Warns once if there are fewer.
            dataset: Former name of x.

        Returns:
            Name -> value: "loss", and each metric. A float for a single number, otherwise a CPU tensor.

        Raises:
            FailedPreconditionError: `compile` was not called.
            InvalidArgumentError: The dataset has no batch or, without `steps`, never ends; or as for :meth:`fit`.
            SpecError: Elements are not (x, y) or (x, y, sample_weight).

        >>> import numpy as np, torch
        >>> x = np.arange(8, dtype=np.float32)[:, None]
        >>> with rd.OneDeviceStrategy("cpu").scope():
        ...     model = rd.Model(torch.nn.Linear(1, 1))
        ...     model.compile(torch.optim.SGD(model.parameters(), lr=0.01), torch.nn.MSELoss())
        >>> list(model.evaluate(rd.Dataset.from_tensor_slices((x, x)).batch(3), verbose=False))
        ['loss']

        Source: keras.Model.evaluate.
        """
        trainee = self._trainee()
        require_at_least("steps", steps)
        own_loss = trainee.compiled.loss is None
        data = distributed(self._strategy, x, y, batch_size, dataset, what="evaluate", own_loss=own_loss)
        hooks = CallbackList(callbacks, self, {"epochs": None, "steps": num_steps(data, steps)})
        with open_view(*progress_stream(callbacks, verbose=verbose)) as view:
            reporter = Reporter(view)
            logs = Evaluation(trainee, hooks, reporter).run(data, "Evaluate", steps)
            reporter.result(logs)
        return logs

    @folded
    def predict(
        self,
        x: Data | Any = None,
        batch_size: int | None = None,
        callbacks: Sequence[Callback] = (),
        *,
        verbose: bool = True,
        steps: int | None = None,
        dataset: Data | None = None,
    ) -> Any:
        """Return the module's outputs for every row, in the order of the dataset. Blocks; does not need `compile`.

        Elements may be x alone, or tuples whose first item is x. With `loss="model"`, elements are as for :meth:`fit`.
        The module runs in evaluation mode, one batch per call to the replicas.

        Args:
            x: A dataset batched by the global batch size; or arrays, or a DataLoader, as for :meth:`fit`.
            batch_size: Rows of a global batch of arrays; None: 32.
            callbacks: Callbacks whose `on_predict_...` hooks are called.
            verbose: Show progress, as in :meth:`fit`.
            steps: Number of batches; None: all batches. Warns once if there are fewer.
            dataset: Former name of x.

        Returns:
            A CPU tensor of all rows, or a nest of such tensors if the module returns a nest. In the nest, lists become
            tuples, and values that are not tensors (a text, a number, a key-value cache) become None. With
            `loss="model"`, the outputs with one entry per row, as a dict, tuple or tensor, without loss and caches.

        Raises:
            InvalidArgumentError: The dataset has no batch or, without `steps`, never ends; or as for :meth:`fit`.
            SpecError: An output does not have one entry per row, or rows of different batches differ in shape.

        >>> import torch
        >>> rd.Model(torch.nn.Flatten()).predict(rd.Dataset.range(4).batch(2).batch(2), verbose=False)
        tensor([[0, 1],
                [2, 3]])

        Source: keras.Model.predict.
        """
        require_at_least("steps", steps)
        own_loss = self._compiled is not None and self._compiled.loss is None
        data = distributed(self._strategy, x, None, batch_size, dataset, what="predict", own_loss=own_loss)
        hooks = CallbackList(callbacks, self, {"epochs": None, "steps": num_steps(data, steps)})
        with open_view(*progress_stream(callbacks, verbose=verbose)) as view:
            prediction = Prediction(self._strategy, self._module, hooks, Reporter(view), self._prediction_step())
            return prediction.run(data, steps)

    def _prediction_step(self) -> Step:
        compiled = self._compiled
        precision, own_loss = (None, False) if compiled is None else (compiled.precision, compiled.loss is None)
        in_stages = is_in_stages(self._strategy)
        return prediction_step(self._module, precision, by_keyword=own_loss, in_stages=in_stages)

    def save(self, path: str | os.PathLike[str], optimizer: bool = True) -> None:
        """Save module and optimizer state as one safetensors file. Replaces `path` atomically.

        Waits for dispatched steps. The file contains no pickled objects.

        Args:
            path: The file, or a URI that fsspec supports; its folder is created if needed.
            optimizer: Also save the optimizer's state if the model is compiled.

        Raises:
            InvalidArgumentError: `config`, or a value in `module.state_dict()` that is not a tensor, is not JSON-able;
                or `compile` got several optimizers.
            FailedPreconditionError: The program has no permission to write to the folder.
            OSError: The file system failed, for example because it is full. A previous file at `path` stays.

        >>> import tempfile, torch
        >>> model = rd.Model(torch.nn.Linear(2, 1), config={"in_features": 2, "out_features": 1})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save(f"{folder}/model.safetensors")
        ...     again = rd.Model.load(f"{folder}/model.safetensors")
        >>> torch.equal(again.module.weight, model.module.weight)
        True

        Source: keras.Model.save.
        """
        optimizers = () if self._compiled is None or not optimizer else self._compiled.update.optimizers
        if len(optimizers) > 1:
            raise InvalidArgumentError(
                f"A model file holds the state of one optimizer, got {len(optimizers)}. Save with optimizer=False, or "
                "save all by rd.Checkpoint(model=model)."
            )
        write_model_file(path, *pack(self._module, next(iter(optimizers), None), self._config))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        module: nn.Module | Callable[..., nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Model:
        """Return a new model with the state in a file. Call this in the scope of a strategy.

        Args:
            path: A file written by `save`, or a URI that fsspec supports.
            module: The module to load into, in place; or a class or function that creates the module from the saved
                `config`. None: build the module that the file describes, which must be a module of `torch.nn` or a
                container (`Sequential`, `ModuleList`, `ModuleDict`) of such modules. Loading a file imports no code.
            optimizer: An optimizer over `module`'s parameters to load into, in place.

        Returns:
            The model, not compiled; call :meth:`compile` to continue training.

        Raises:
            NotFoundError: The file does not exist.
            DataLossError: The file is damaged.
            InvalidArgumentError: State and module (or optimizer) do not fit, or the module cannot be built.

        >>> import tempfile, torch
        >>> module = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.ReLU())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rd.Model(module).save(f"{folder}/model.safetensors")
        ...     model = rd.Model.load(f"{folder}/model.safetensors")
        >>> model.module[0]
        Linear(in_features=2, out_features=1, bias=True)

        Source: keras.models.load_model.
        """
        tensors, manifest = read_model_file(path)
        target = rebuild(manifest, tensors) if module is None else make_module(module, manifest)
        restore_module(target, tensors, manifest)
        if optimizer is not None:
            restore_optimizer(optimizer, tensors, manifest)
        return cls(target, config=manifest.config)

    def export(
        self,
        directory: str | os.PathLike[str],
        example_inputs: Any,
        feature_space: FeatureSpace | None = None,
    ) -> str:
        """Write the module's forward pass as a new version, for `rd.load_exported` and `rd.serve`. Blocks.

        The version, `directory/<number>/`, appears as a whole. It has a `torch.export` program that takes any number of
        rows, the weights as safetensors, and a signature as JSON; nothing of it needs the module's code. A copy of the
        module is traced, in evaluation mode, on the CPU and without autocast.

        Args:
            directory: Directory of the model's versions, local or mounted.
            example_inputs: A batch of inputs as `predict` takes them: a tensor, a tuple of arguments, or a dict. Values
                do not matter; shapes other than the number of rows do. With a feature space, a dict of features; of a
                feature with any number of values there must be rows of different lengths.
            feature_space: Turns features into the module's input, a dict of tensors; saved with the program.

        Returns:
            The path of the version.

        Raises:
            InvalidArgumentError: torch.export cannot trace the module for any number of rows, the feature space has
                functions, or the module has a ShardedEmbedding.
            SpecError: The examples are no tensors, or an output has no row for each row of the inputs.

        >>> import os, tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> path = rd.Model(torch.nn.Linear(2, 1)).export(folder, torch.zeros(1, 2))
        >>> os.path.basename(path), sorted(os.listdir(path))
        ('1', ['model.safetensors', 'program.pt2', 'signature.json'])

        Source: keras.Model.export.
        """
        own_loss = self._compiled is not None and self._compiled.loss is None
        return export_module(self._module, directory, example_inputs, feature_space, by_keyword=own_loss)
