"""A module, its strategy, and how it is to be trained: what the parts of `Model` share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from raydist.errors import FailedPreconditionError, InvalidArgumentError
from raydist.metrics import Mean
from raydist.options.requirement import require
from raydist.strategies.default import get_strategy
from raydist.training.losses import loss_by_name
from raydist.training.optimizers import optimizer_by_name, require_optimizer
from raydist.training.passes import require_at_least
from raydist.training.precision import Precision
from raydist.training.steps import Compiled, Trainee
from raydist.training.trackers import RowCount, Trackers, named_metrics
from raydist.training.updates import Accumulation, Update, scheduler_of

if TYPE_CHECKING:
    from torchmetrics import Metric

    from raydist.context.strategy import Strategy
    from raydist.training.callbacks.callback import TrainedModel

__all__ = ["CompiledModel"]


class CompiledModel(ABC):
    """A module, its strategy, and how it is to be trained: what the parts of `Model` share.

    Args:
        module: The module; its parameters are trained in place.
        config: JSON-able keyword arguments of the module's constructor.

    Attributes:
        stop_training: Set it in a callback to end `fit` after the current execution.
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
        return self._trainee().compiled.update.optimizer

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """The metrics of `compile` by their names in logs. FailedPreconditionError before.

        >>> import torch
        >>> model = rd.Model(torch.nn.Linear(2, 1))
        >>> model.compile("sgd", "mse")
        >>> dict(model.metrics)
        {}

        Source: keras.Model.metrics.
        """
        return self._trainee().compiled.trackers.metrics

    def checkpoint_objects(self) -> dict[str, Any]:
        """What a checkpoint of the model holds, by name.

        Returns:
            "model", the module; once it is compiled "optimizer" and, where there is one, "scheduler".

        Source: raydist's own; a keras.Model is its own checkpoint.

        >>> import torch
        >>> model = rd.Model(torch.nn.Linear(2, 1))
        >>> model.compile("sgd", "mse")
        >>> rd.Checkpoint(**model.checkpoint_objects())
        Checkpoint(model, optimizer)
        """
        if self._compiled is None:
            return {"model": self._module}
        found = self._compiled.update.scheduler or self._compiled.scheduler_here
        scheduler = {} if found is None else {"scheduler": found}
        return {"model": self._module, "optimizer": self._compiled.update.optimizer, **scheduler}

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
        scheduler: LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        clip_norm: float | None = None,
        accumulate_steps: int = 1,
        precision: Precision = None,
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
            scheduler: A learning rate scheduler of torch's over this optimizer, or a function that makes one of it. It
                steps after each step of the optimizer (with several workers of a ParameterServerStrategy: on the
                driver, with each batch that is handed out); for one that counts epochs write a callback.
            clip_norm: Most that the norm of all gradients together may be, > 0; larger ones are scaled down.
            accumulate_steps: Global batches whose gradients make one step: the mean over the rows of all of them (with
                sample weights, by these), as if they were one batch. What is left at the end of an epoch makes a step
                of its own.
            precision: "bf16": the module's forward runs under torch.autocast, in training, evaluation and prediction,
                and hands out float32; parameters and gradients stay as they are. None: as they are.

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
        require_at_least("accumulate_steps", accumulate_steps)
        require(clip_norm is None or clip_norm > 0, "clip_norm must be > 0 or None", clip_norm)
        require(precision in (None, "bf16"), 'precision must be "bf16" or None', precision)
        apart = len(self._strategy.worker_devices) > self._strategy.num_replicas_in_sync
        if apart and accumulate_steps > 1:
            raise InvalidArgumentError(
                "accumulate_steps must be 1 where several workers train apart from each other: the batches of a group "
                f"would go to different ones. Got {accumulate_steps}. Use larger batches, or one worker."
            )
        with self._strategy.scope():
            loss, row_loss = loss_by_name(loss) if isinstance(loss, str) else (loss, loss)
            if isinstance(optimizer, str):
                optimizer = optimizer_by_name(optimizer, self._module)
            trackers = Trackers(Mean(), RowCount(), named_metrics(metrics))
            accumulation = Accumulation(accumulate_steps) if accumulate_steps > 1 else None
        require_optimizer(optimizer, self._module, loss)
        if not callable(loss):
            raise InvalidArgumentError(f"loss must be callable as loss(prediction, target), got {loss!r}.")
        with self._strategy.scope():
            found = scheduler_of(scheduler, optimizer)
        update = Update(optimizer, None if apart else found, clip_norm, accumulation)
        here = found if apart else None
        self._compiled = Compiled(update, loss, row_loss, trackers, steps_per_execution, precision, here)

    @abstractmethod
    def _whole(self) -> TrainedModel:
        """The model with all its parts, as callbacks see it."""

    def _trainee(self) -> Trainee:
        if self._compiled is None:
            raise FailedPreconditionError(
                f"This model of {type(self._module).__name__} must be compiled first: model.compile(optimizer, loss)."
            )
        return Trainee(self._strategy, self._module, self._compiled)
