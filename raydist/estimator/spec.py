"""Descriptions for estimators: what a model_fn returns, how an estimator runs, and what is trained and evaluated."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, final

from raydist.core.errors import InvalidArgumentError
from raydist.training.passes import require_at_least

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LRScheduler

    from raydist.context.strategy import Strategy
    from raydist.training.callbacks.callback import Callback


@final
class ModeKeys(StrEnum):
    """The modes in which an estimator calls its model_fn.

    Source: tf.estimator.ModeKeys.
    """

    TRAIN = "train"
    """The step computes gradients of the loss, and the optimizers make an update."""
    EVAL = "eval"
    """The loss and metrics are computed."""
    PREDICT = "infer"
    """The predictions are computed; there are no labels."""


@final
@dataclass(frozen=True)
class EstimatorSpec:
    """The result of a model_fn.

    Attributes:
        mode: The mode that the model_fn was called with.
        predictions: A tensor with an entry for each row, or a nest of such; required for `PREDICT`.
        loss: As for `compile(loss="model")`: made of torch's means, one value per row, or a pair (sum, denominator);
            required for `TRAIN` and `EVAL`.
        optimizer: The optimizer, or several over different parameters, made by `get_or_create`; required for `TRAIN`.
        eval_metric_ops: For `EVAL`: name -> (metric, *arguments of its `update`). A metric is made by `get_or_create`.
        scheduler: A scheduler of the (first) optimizer, which steps with it.
        clip_norm: Largest norm of the global gradient.
        loss_reduction: "mean" or "sum", for scalars whose denominator torch's losses do not tell: see `compile`.

    Source: tf.estimator.EstimatorSpec, whose `train_op` is `optimizer` here.

    >>> import torch
    >>> spec = rd.EstimatorSpec(rd.ModeKeys.PREDICT, predictions=torch.ones(2, 1))
    """

    mode: str
    predictions: Any = None
    loss: torch.Tensor | tuple[torch.Tensor, torch.Tensor | float] | None = None
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
    eval_metric_ops: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    scheduler: LRScheduler | None = None
    clip_norm: float | None = None
    loss_reduction: Literal["mean", "sum"] | None = None

    def __post_init__(self) -> None:
        needed = {ModeKeys.TRAIN: ("loss", "optimizer"), ModeKeys.EVAL: ("loss",), ModeKeys.PREDICT: ("predictions",)}
        for name in needed[ModeKeys(self.mode)]:
            if getattr(self, name) is None:
                raise InvalidArgumentError(f"An EstimatorSpec for mode '{self.mode}' must have {name}, got None.")


@final
@dataclass(frozen=True)
class RunConfig:
    """Settings of an estimator.

    Attributes:
        model_dir: Directory of checkpoints and, if it is a local one, of curves for TensorBoard.
        tf_random_seed: Seed that `train` gives to `torch.manual_seed`; None: the generator is left as it is.
        train_distribute: Strategy of the training; None: that of the scope around the call, else one CPU.
        eval_distribute: Strategy of evaluation and prediction; None: that of the training.
        save_checkpoints_steps: Steps between two checkpoints.
        save_checkpoints_secs: Seconds between two checkpoints; None for both: 600.
        keep_checkpoint_max: Number of newest checkpoints to keep; None: all.
        save_summary_steps: Steps between two points of the curves in `model_dir`; None: no curves.
        log_step_count_steps: Steps between two lines of the log, and points of `global_step/sec`; None: none.

    Source: tf.estimator.RunConfig.

    >>> config = rd.RunConfig("model", save_checkpoints_steps=100)
    """

    model_dir: str | os.PathLike[str] | None = None
    tf_random_seed: int | None = None
    train_distribute: Strategy | None = None
    eval_distribute: Strategy | None = None
    save_checkpoints_steps: int | None = None
    save_checkpoints_secs: float | None = None
    keep_checkpoint_max: int | None = 5
    save_summary_steps: int | None = 100
    log_step_count_steps: int | None = 100

    def __post_init__(self) -> None:
        if self.save_checkpoints_steps is not None and self.save_checkpoints_secs is not None:
            raise InvalidArgumentError(
                "Give save_checkpoints_steps or save_checkpoints_secs, got "
                f"{self.save_checkpoints_steps!r} and {self.save_checkpoints_secs!r}."
            )
        if self.save_checkpoints_steps is None and self.save_checkpoints_secs is None:
            object.__setattr__(self, "save_checkpoints_secs", 600)
        for name in ("save_checkpoints_steps", "keep_checkpoint_max", "save_summary_steps", "log_step_count_steps"):
            require_at_least(name, getattr(self, name))


@final
@dataclass(frozen=True)
class TrainSpec:
    """The training of `rd.train_and_evaluate`.

    Attributes:
        input_fn: Gives the training data; see `Estimator.train`.
        max_steps: Global step to stop at; None: at the end of the data.
        hooks: Callbacks of the training.

    Source: tf.estimator.TrainSpec.

    >>> train_spec = rd.TrainSpec(lambda: rd.Dataset.range(8).batch(2), max_steps=1000)
    """

    input_fn: Callable[..., Any]
    max_steps: int | None = None
    hooks: Sequence[Callback] = ()


@final
@dataclass(frozen=True)
class EvalSpec:
    """The evaluations of `rd.train_and_evaluate`.

    Attributes:
        input_fn: Gives the data of an evaluation; called for each.
        steps: Largest number of batches of an evaluation; None: all.
        name: Name of the evaluation, if there are several.
        hooks: Callbacks of the evaluation.
        throttle_secs: Seconds between the beginnings of two evaluations at least, but for the last.

    Source: tf.estimator.EvalSpec.

    >>> eval_spec = rd.EvalSpec(lambda: rd.Dataset.range(8).batch(2), throttle_secs=60)
    """

    input_fn: Callable[..., Any]
    steps: int | None = 100
    name: str | None = None
    hooks: Sequence[Callback] = ()
    throttle_secs: float = 600
