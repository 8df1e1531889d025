"""`Model`: compile, fit, evaluate and predict for any torch module, over any strategy."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from raydist.errors import FailedPreconditionError, InvalidArgumentError
from raydist.metrics import Mean
from raydist.strategies.default import get_strategy
from raydist.training.callback_list import CallbackList
from raydist.training.callbacks import Callback, History
from raydist.training.class_weights import ClassWeights
from raydist.training.evaluation import Evaluation
from raydist.training.fit import Fit, FitPlan
from raydist.training.given_data import GivenData, held_out_data
from raydist.training.losses import loss_by_name
from raydist.training.model_state import make_module, pack, rebuild, restore_module, restore_optimizer
from raydist.training.optimizers import optimizer_by_name, require_optimizer
from raydist.training.passes import num_steps, require_at_least
from raydist.training.prediction import Prediction
from raydist.training.reporter import Reporter
from raydist.training.saving import read_model_file, write_model_file
from raydist.training.steps import Compiled, Trainee
from raydist.training.trackers import RowCount, Trackers, named_metrics
from raydist.training.views import open_view

if TYPE_CHECKING:
    from raydist.context.strategy import Strategy
    from raydist.dataset import Dataset
    from raydist.distributed_dataset import DistributedDataset

    Data = Dataset | DistributedDataset

__all__ = ["Model"]


@final
class Model:
    """Trains a module with the strategy in whose scope it was made (keras.Model).

    Every number is the one that a single replica would give: the loss that is optimised is the mean over the rows of
    the *global* batch, losses and metrics count every row once, however rows fall on replicas.

    Elements of datasets are (x, y) or (x, y, sample_weight), batched by the global batch size; arrays and torch
    DataLoaders are taken as well. The module is called with x; a plain tuple is unpacked into its arguments. With
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
        stop_training: Set it in a callback to end `fit` after the current execution.

    Raises:
        InvalidArgumentError: `module` is no torch.nn.Module instance.
    """

    def __init__(self, module: nn.Module, *, config: Mapping[str, Any] | None = None) -> None:
        if not isinstance(module, nn.Module):
            raise InvalidArgumentError(f"Model needs a torch.nn.Module instance, got {module!r}.")
        self._module = module
        self._config = config
        self._strategy = get_strategy()
        self._compiled: Compiled | None = None
        self.stop_training = False

    @property
    def module(self) -> nn.Module:
        """The trained module.

        >>> import torch
        >>> rd.Model(torch.nn.Linear(2, 1)).module
        Linear(in_features=2, out_features=1, bias=True)

        Source: raydist's own; a keras.Model is its own module.
        """
        return self._module

    @property
    def strategy(self) -> Strategy:
        """The strategy that was current when the model was made.

        >>> import torch
        >>> with rd.OneDeviceStrategy("cpu").scope():
        ...     model = rd.Model(torch.nn.Linear(2, 1))
        >>> model.strategy.num_replicas_in_sync
        1

        Source: keras.Model.distribute_strategy.
        """
        return self._strategy

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that `compile` was given, or made. FailedPreconditionError before.

        >>> import torch
        >>> model = rd.Model(torch.nn.Linear(2, 1))
        >>> model.compile("sgd", "mse")
        >>> model.optimizer.param_groups[0]["lr"] = 0.5

        Source: keras.Model.optimizer.
        """
        return self._trainee().compiled.optimizer

    def parameters(self) -> Iterator[nn.Parameter]:
        """The module's parameters, for optimizers.

        Returns:
            What `module.parameters()` gives.

        >>> import torch
        >>> [tuple(parameter.shape) for parameter in rd.Model(torch.nn.Linear(2, 1)).parameters()]
        [(1, 2), (1,)]

        Source: torch.nn.Module.parameters.
        """
        return self._module.parameters()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module here, on the driver. Waits for dispatched steps, whose updates it sees.

        Args:
            *args: Passed on to the module.
            **kwargs: Passed on to the module.

        Returns:
            What the module returns.

        >>> import torch
        >>> rd.Model(torch.nn.Flatten())(torch.zeros(3, 2, 2)).shape
        torch.Size([3, 4])

        Source: keras.Model.call.
        """
        return self._module(*args, **kwargs)

    def compile(
        self,
        optimizer: torch.optim.Optimizer | str,
        loss: Callable[[Any, Any], torch.Tensor] | str,
        metrics: Any = (),
        steps_per_execution: int = 1,
    ) -> None:
        """Say how to train. Call it in the scope, where optimizer and metrics must be made.

        Args:
            optimizer: Over parameters of the module; or the name of one of torch's ("adam", "AdamW"), with its
                defaults.
            loss: `loss(prediction, target)` on one replica's rows, a function or a module: a scalar that is their
                mean, or one loss per row (required for sample weights). Of torch's modules also those that add rows up
                (`reduction="sum"`), and means over tokens or by weights of classes (`CrossEntropyLoss`, `NLLLoss`). A
                function of yours that is a sum, or a mean over anything else but rows, does not add up over replicas:
                give losses per row then. Or the name of one of torch's ("mse", "cross_entropy"), with its defaults.
            metrics: torchmetrics metrics, updated with (prediction, target): a sequence, or a dict that names them in
                logs. Otherwise they are named by their class: "multiclass_accuracy". Each replica updates its own with
                its rows; those of torchmetrics' classification, which guess from a batch whether it holds logits, see
                the whole batch where its pieces look different. What others take from a batch as a whole, such as the
                `data_range` of SSIM, must be given.
            steps_per_execution: Steps per call to the replicas, which then run the loop; callbacks are called once per
                execution. Worth it for steps of a few milliseconds.

        Raises:
            InvalidArgumentError: An argument is of the wrong kind, or the optimizer's parameters are not the module's.

        Blocking: no; nothing is sent to the replicas yet.

        >>> import torch
        >>> with rd.OneDeviceStrategy("cpu").scope():
        ...     model = rd.Model(torch.nn.Linear(2, 1))
        ...     model.compile(torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.MSELoss(), steps_per_execution=10)

        Source: keras.Model.compile.
        """
        require_at_least("steps_per_execution", steps_per_execution)
        with self._strategy.scope():
            loss, row_loss = loss_by_name(loss) if isinstance(loss, str) else (loss, loss)
            if isinstance(optimizer, str):
                optimizer = optimizer_by_name(optimizer, self._module)
            trackers = Trackers(Mean(), RowCount(), named_metrics(metrics))
        require_optimizer(optimizer, self._module, loss)
        if not callable(loss):
            raise InvalidArgumentError(f"loss must be callable as loss(prediction, target), got {loss!r}.")
        self._compiled = Compiled(optimizer, loss, row_loss, trackers, steps_per_execution)

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
        dataset: Data | None = None,
    ) -> History:
        """Train for some epochs.

        Args:
            x: A dataset, batched by the global batch size; each epoch iterates it anew. Or arrays or tensors, one or a
                nest of them. Or a torch DataLoader, whose dataset, batch size and order are taken over: samples are
                read one at a time, without its workers (`Dataset.from_torch` reads more at a time).
            y: Targets that belong to arrays x; datasets hold their own.
            batch_size: Rows of a global batch of arrays; None: 32.
            epochs: Number of the last epoch, >= 1, counted from 1.
            steps_per_epoch: Batches per epoch, >= 1; None: all there are. With a number the iterator goes on from epoch
                to epoch; when it ends early, there is one warning and training stops.
            validation_data: Evaluated after epochs; its results get "val_" in front of their names. A dataset or a
                DataLoader, or arrays (x, y), in batches of `batch_size`.
            callbacks: Called at the joints of the training, in this order.
            verbose: Show progress: a bar in a terminal, one changing line in a notebook, plain lines in a log.
            shuffle: Arrays come in a new random order every epoch, whose seed follows `torch.manual_seed`; datasets and
                DataLoaders have their own order.
            initial_epoch: Number of the first epoch, counted from 0: to go on where an earlier `fit` stopped.
            validation_freq: Validate every so many epochs, or those whose numbers, from 1, are in a container.
            validation_steps: Batches of a validation; None: all there are.
            class_weight: What training rows of a class weigh, by class number; 1 where it says nothing. As with sample
                weights the loss is sum(w * loss) / sum(w) of losses per row.
            dataset: What x was called once.

        Returns:
            The history of the logs: `.history["loss"]` has one value per epoch.

        Raises:
            FailedPreconditionError: `compile` was not called.
            InvalidArgumentError: A dataset has no batch or never ends, a number is < 1, arguments do not go together,
                or a DataLoader does something of its own: says what to write.
            SpecError: Elements are not (x, y) or (x, y, sample_weight).
            UnavailableError: A replica or the input pipeline is gone; names it.

        Blocking: returns when all steps are done. A user function's error is raised here, with its type.

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
        data = GivenData(x, y, batch_size, dataset).distributed(self._strategy, shuffle=shuffle)
        weights = ClassWeights.parse(class_weight)
        plan = FitPlan(data, epochs, steps_per_epoch, initial_epoch, validation_freq, weights)
        require_at_least("validation_steps", validation_steps)
        validation = None if validation_data is None else held_out_data(validation_data, batch_size)
        held_out = None if validation is None else validation.distributed(self._strategy)
        history = History()
        params = {"epochs": epochs, "steps": plan.total()}
        hooks = CallbackList((*callbacks, history), self, params)
        if not self._module.training:
            self._module.train()
        with open_view(verbose) as view:
            evaluation = Evaluation(trainee, hooks, Reporter(view))
            validate = None if held_out is None else lambda label: evaluation.run(held_out, label, validation_steps)
            Fit(trainee, plan, model=self, callbacks=hooks, reporter=Reporter(view), validate=validate).run()
        return history

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
        """Loss and metrics over a dataset, with the module in evaluation mode. Waits for the result.

        Args:
            x: Batched by the global batch size; elements as for :meth:`fit`. Or arrays, or a DataLoader, as there.
            y: Targets that belong to arrays x.
            batch_size: Rows of a global batch of arrays; None: 32.
            callbacks: Their `on_test_...` hooks are called.
            verbose: Show progress, as in :meth:`fit`.
            steps: Batches to look at; None: all there are. One warning where there are fewer.
            dataset: What x was called once.

        Returns:
            Name -> value: "loss", and each metric. A float where it is a single number, else a CPU tensor.

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
        data = GivenData(x, y, batch_size, dataset, what="evaluate").distributed(self._strategy)
        hooks = CallbackList(callbacks, self, {"epochs": None, "steps": num_steps(data, steps)})
        with open_view(verbose) as view:
            reporter = Reporter(view)
            logs = Evaluation(trainee, hooks, reporter).run(data, "Evaluate", steps)
            reporter.result(logs)
        return logs

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
        """The module's outputs for every row, in the order of the dataset. Waits for them; needs no `compile`.

        Elements may be x alone, or tuples whose first part is x. The module runs in evaluation mode, one batch per call
        to the replicas.

        Args:
            x: Batched by the global batch size. Or arrays, or a DataLoader, as for :meth:`fit`.
            batch_size: Rows of a global batch of arrays; None: 32.
            callbacks: Their `on_predict_...` hooks are called.
            verbose: Show progress, as in :meth:`fit`.
            steps: Batches to look at; None: all there are. One warning where there are fewer.
            dataset: What x was called once.

        Returns:
            A CPU tensor of all rows, or a nest of them as the module returns it (lists as tuples).

        Raises:
            InvalidArgumentError: The dataset has no batch or, without `steps`, never ends; or as for :meth:`fit`.
            SpecError: An output has not one entry per row, or rows of different batches differ in shape.

        >>> import torch
        >>> rd.Model(torch.nn.Flatten()).predict(rd.Dataset.range(4).batch(2).batch(2), verbose=False)
        tensor([[0, 1],
                [2, 3]])

        Source: keras.Model.predict.
        """
        require_at_least("steps", steps)
        data = GivenData(x, None, batch_size, dataset, what="predict").distributed(self._strategy)
        hooks = CallbackList(callbacks, self, {"epochs": None, "steps": num_steps(data, steps)})
        with open_view(verbose) as view:
            return Prediction(self._strategy, self._module, hooks, Reporter(view)).run(data, steps)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save module and optimizer state as one safetensors file, replacing `path` at once or not at all.

        Nothing is pickled. Waits for dispatched steps.

        Args:
            path: The file; its folder is made if there is none.

        Raises:
            InvalidArgumentError: `config`, or a value in `module.state_dict()` that is no tensor, is not JSON-able.
            OSError: The file cannot be written.

        >>> import tempfile, torch
        >>> model = rd.Model(torch.nn.Linear(2, 1), config={"in_features": 2, "out_features": 1})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save(f"{folder}/model.safetensors")
        ...     again = rd.Model.load(f"{folder}/model.safetensors")
        >>> torch.equal(again.module.weight, model.module.weight)
        True

        Source: keras.Model.save.
        """
        optimizer = None if self._compiled is None else self._compiled.optimizer
        write_model_file(path, *pack(self._module, optimizer, self._config))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        module: nn.Module | Callable[..., nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Model:
        """A model with the state of a file, not compiled. Call it in the scope.

        Args:
            path: What `save` wrote.
            module: The module to load into, in place; or a class or function that makes it, which is called with the
                saved `config`. None: what the file says, which may be a module of `torch.nn`, or its containers
                (`Sequential`, `ModuleList`, `ModuleDict`) of such; a file never makes it import code.
            optimizer: An optimizer over `module`'s parameters to load into, in place.

        Returns:
            The model; call :meth:`compile` to train it further.

        Raises:
            NotFoundError: There is no such file.
            DataLossError: The file is damaged.
            InvalidArgumentError: State and module (or optimizer) do not fit, or the module can not be built.

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

    def _trainee(self) -> Trainee:
        if self._compiled is None:
            raise FailedPreconditionError(
                f"This model of {type(self._module).__name__} must be compiled first: model.compile(optimizer, loss)."
            )
        return Trainee(self._strategy, self._module, self._compiled)
