"""The base class of `Model`: a module, its strategy, and the settings of `compile`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.options.requirement import require
from raydist.strategies.functions import get_strategy
from raydist.training.elements import Precision
from raydist.training.losses import kind_of, loss_by_name
from raydist.training.module_passes import is_in_stages
from raydist.training.passes import require_at_least
from raydist.training.settings import CompileSettings, Trainee
from raydist.training.trackers import LossTotal, RowCount, Trackers, named_metrics
from raydist.training.updates import Accumulation, Update, optimizer_by_name, require_optimizer, scheduler_of

if TYPE_CHECKING:
    from torchmetrics import Metric

    from raydist.context.strategy import Strategy


class CompiledModel:
    """The base class of `Model`: a module, its strategy, and the settings of `compile`, if that was called.

    Attributes:
        stop_training: Set to True in a callback to end `fit` after the current execution.
    """

    def __init__(self, module: nn.Module, *, config: Mapping[str, Any] | None = None) -> None:
        if not isinstance(module, nn.Module):
            raise InvalidArgumentError(f"Model needs a torch.nn.Module instance, got {module!r}.")
        self._module = module
        self._config = config
        self._strategy = get_strategy()
        self._compiled: CompileSettings | None = None
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
        """The strategy that was current when the model was created.

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
        """The optimizer passed to `compile`, or made by it; the first of several.

        Raises FailedPreconditionError before `compile`.

        >>> import torch
        >>> model = rd.Model(torch.nn.Linear(2, 1))
        >>> model.compile("sgd", "mse")
        >>> model.optimizer.param_groups[0]["lr"] = 0.5

        Source: keras.Model.optimizer.
        """
        return self._trainee().compiled.update.optimizers[0]

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """The metrics of `compile` by their names in logs. Raises FailedPreconditionError before `compile`.

        >>> import torch
        >>> model = rd.Model(torch.nn.Linear(2, 1))
        >>> model.compile("sgd", "mse")
        >>> dict(model.metrics)
        {}

        Source: keras.Model.metrics.
        """
        return self._trainee().compiled.trackers.metrics

    def checkpoint_objects(self, metrics: bool = False) -> dict[str, Any]:
        """Return the objects for a checkpoint of the model, by name. `rd.Checkpoint(model=model)` does so at each save.

        Args:
            metrics: Include the metrics of `compile`.

        Returns:
            "model", the module; once compiled also, if they exist, "optimizer" (a list of several), "scheduler" and
            "scaler"; with `metrics` also "metrics", a dict.

        Source: raydist's own; a keras.Model is its own checkpoint.

        >>> import torch
        >>> model = rd.Model(torch.nn.Linear(2, 1))
        >>> model.compile("sgd", "mse")
        >>> sorted(model.checkpoint_objects())
        ['model', 'optimizer']
        """
        if self._compiled is None:
            return {"model": self._module}
        update = self._compiled.update
        optimizers: Any = list(update.optimizers)
        found: dict[str, Any] = {
            "optimizer": optimizers[0] if len(optimizers) == 1 else optimizers or None,
            "scheduler": update.scheduler or self._compiled.scheduler_here,
            "scaler": update.scaler,
        }
        extra = {name: value for name, value in found.items() if value is not None}
        if metrics:
            extra["metrics"] = dict(self._compiled.trackers.metrics)
        return {"model": self._module, **extra}

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the module's parameters, for optimizers.

        Returns:
            The iterator `module.parameters()`.

        >>> import torch
        >>> [tuple(parameter.shape) for parameter in rd.Model(torch.nn.Linear(2, 1)).parameters()]
        [(1, 2), (1,)]

        Source: torch.nn.Module.parameters.
        """
        return self._module.parameters()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module in this process, on the driver. Blocks for dispatched steps, whose updates it sees.

        Args:
            *args: Passed on to the module.
            **kwargs: Passed on to the module.

        Returns:
            The module's result.

        >>> import torch
        >>> rd.Model(torch.nn.Flatten())(torch.zeros(3, 2, 2)).shape
        torch.Size([3, 4])

        Source: keras.Model.call.
        """
        return self._module(*args, **kwargs)

    def compile(
        self,
        optimizer: torch.optim.Optimizer | str | Sequence[torch.optim.Optimizer],
        loss: Callable[[Any, Any], Any] | str,
        metrics: Any = (),
        steps_per_execution: int = 1,
        scheduler: LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        clip_norm: float | None = None,
        accumulate_steps: int = 1,
        precision: Precision = None,
        loss_reduction: Literal["mean", "sum"] | None = None,
    ) -> None:
        """Configure training. Call it in the scope, where optimizer and metrics must be created, too.

        Args:
            optimizer: An optimizer over parameters of the module; or the name of a torch optimizer ("adam", "AdamW"),
                used with its defaults. Or several, each over parameters of its own; none, (), for a model that is
                evaluated only.
            loss: A function or module `loss(prediction, target)` of one replica's rows; or the name of a torch loss
                ("mse", "cross_entropy"), used with its defaults; or "model". A function returns one value per row
                (required for sample weights), a scalar, or a pair (sum, denominator), as in Megatron-LM. Sums are
                divided by the denominator of the *global* batch: the number of rows, or the sum of the pairs'
                denominators. For a scalar that is computed by torch's loss functions and numbers alone, raydist takes
                the denominators of these functions (counted labels, class weights, rows); torch modules with
                `reduction="sum"` are not divided. Any other scalar must be a mean over rows, or `loss_reduction` must
                say what it is: where several replicas or batches share the rows of a step, the mean is now and then
                compared with the means of halves of the rows, and another value is an error. "model": the module
                computes its loss, as Hugging Face models do. It gets the keys of dict batches as keyword arguments, and
                returns the loss as `.loss`, `["loss"]`, the first item of a tuple, or alone. The loss must be computed
                by torch's loss functions, and is divided like a function's scalar. A sum of means with different
                denominators, such as start and end of answers, is exact for each batch; over several batches, logs and
                `evaluate` weigh it by the average denominator.
            metrics: torchmetrics metrics, updated with (prediction, target), or (logits, labels) if the module computes
                its loss: a sequence, or a dict with their names in logs. The default name is that of the class:
                "multiclass_accuracy". Each replica updates its own copy with its rows; torchmetrics' classification
                metrics, which guess from a batch if it holds logits, see the whole batch if the replicas' guesses
                differ. Values that other metrics derive from a whole batch, such as the SSIM `data_range`, must be
                given.
            steps_per_execution: Steps per call to the replicas, which then run the loop; callbacks are called once per
                execution. Useful for steps of a few milliseconds.
            scheduler: A torch learning rate scheduler over this optimizer, or a function that creates one from the
                optimizer. The scheduler steps after each optimizer step (with several workers of a
                ParameterServerStrategy: on the driver, with each dispatched batch). To count epochs, write a callback.
            clip_norm: Limit of the norm of all gradients together, > 0; larger gradients are scaled down.
            accumulate_steps: Number of global batches whose gradients make one step, as if they were one batch: the
                mean over all of their rows, counted labels or sample weights. Remaining batches at the end of an epoch
                make a step.
            precision: "bf16": the module's forward runs under torch.autocast, in training, evaluation and prediction,
                and returns float32; parameters and gradients keep their types. "fp16": the same with float16, and a
                `torch.amp.GradScaler` scales the loss: a step whose gradients are not finite is skipped on all
                replicas. None: no autocast.
            loss_reduction: Reduction of a scalar loss if the code of the loss does not tell: "mean" over its rows;
                "sum" over its rows, or divided by a global denominator. For example the mean of a contrastive loss.

        Raises:
            InvalidArgumentError: An argument has the wrong type, or the optimizer's parameters are not the module's.

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
        require(precision in (None, "bf16", "fp16"), 'precision must be "bf16", "fp16" or None', precision)
        require(loss_reduction in (None, "mean", "sum"), 'loss_reduction must be "mean", "sum" or None', loss_reduction)
        apart = len(self._strategy.worker_devices) > self._strategy.num_replicas_in_sync
        if apart and accumulate_steps > 1:
            raise InvalidArgumentError(
                "accumulate_steps must be 1 where several workers train apart from each other: the batches of a group "
                f"would go to different ones. Got {accumulate_steps}. Use larger batches, or one worker."
            )
        if apart and precision == "fp16":
            raise InvalidArgumentError(
                'precision must be "bf16" or None where several workers train apart from each other: each would scale '
                'losses by itself. Got "fp16". Use "bf16", or one worker.'
            )
        own_loss = isinstance(loss, str) and loss == "model"
        if is_in_stages(self._strategy) and (own_loss or precision == "fp16" or steps_per_execution > 1):
            raise InvalidArgumentError(
                'Under PipelineStrategy the loss must be a function of (prediction, target), precision "bf16" or None, '
                f"and steps_per_execution 1, got loss={loss!r:.40}, precision={precision!r} and "
                f"steps_per_execution={steps_per_execution}. Use ShardedStrategy for others."
            )
        with self._strategy.scope():
            found_loss, row_loss = _losses(None if own_loss else loss)
            if isinstance(optimizer, str):
                optimizer = optimizer_by_name(optimizer, self._module)
            optimizers: Any = tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)
            kind = kind_of(found_loss, loss_reduction)
            trackers = Trackers(LossTotal(is_sum=kind == "sum"), RowCount(), named_metrics(metrics))
            fp16 = precision == "fp16"
            # "cpu" only means that the driver needs no GPU: the scale is on the device of the losses.
            scaler = torch.amp.GradScaler("cpu") if fp16 else None
            accumulation = Accumulation(accumulate_steps, scaled=fp16) if accumulate_steps > 1 else None
        for each in optimizers:
            require_optimizer(each, self._module, found_loss)
        with self._strategy.scope():
            steps_with = None if scheduler is None else scheduler_of(scheduler, optimizers[0])
        update = Update(optimizers, None if apart else steps_with, clip_norm, accumulation, scaler)
        here = steps_with if apart else None
        self._compiled = CompileSettings(
            update, found_loss, row_loss, kind, trackers, steps_per_execution, precision, here
        )

    def _trainee(self) -> Trainee:
        if self._compiled is None:
            raise FailedPreconditionError(
                f"This model of {type(self._module).__name__} must be compiled first: model.compile(optimizer, loss)."
            )
        return Trainee(self._strategy, self._module, self._compiled)


def _losses(given: Any) -> tuple[Any, Any]:
    if isinstance(given, str):
        return loss_by_name(given)
    if given is not None and not callable(given):
        raise InvalidArgumentError(f"loss must be callable as loss(prediction, target), got {given!r}.")
    return given, given
