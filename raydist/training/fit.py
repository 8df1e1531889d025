"""`fit`: epochs of training steps, each with its validation."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from raydist.errors import InvalidArgumentError
from raydist.options import RunOptions
from raydist.training.elements import unpack
from raydist.training.executions import Executions, executions
from raydist.training.passes import num_batches, opened, require_finite, require_steps, run_pass
from raydist.training.steps import Trainee, training_step
from raydist.values import ReduceOp

if TYPE_CHECKING:
    from raydist.distributed_dataset import DistributedDataset
    from raydist.training.callback_list import CallbackList
    from raydist.training.callbacks import TrainedModel
    from raydist.training.reporter import Reporter

__all__ = ["Fit", "FitPlan"]


@final
@dataclass(frozen=True, slots=True)
class FitPlan:
    """How long to train.

    Attributes:
        data: The training data.
        epochs: Number of epochs, >= 1.
        steps_per_epoch: Batches of an epoch, >= 1; one iterator then goes on from epoch to epoch. None: an epoch is a
            pass over the data.
    """

    data: DistributedDataset
    epochs: int
    steps_per_epoch: int | None

    def __post_init__(self) -> None:
        for name in ("epochs", "steps_per_epoch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidArgumentError(f"{name} must be >= 1, got {value!r}.")
        if self.steps_per_epoch is None:
            require_finite(self.data, "fit without steps_per_epoch")

    def total(self) -> int | None:
        """Batches of one epoch, if known."""
        return num_batches(self.data) if self.steps_per_epoch is None else self.steps_per_epoch

    def options(self) -> RunOptions:
        """How gradients meet: the loss is a mean over rows, or has a global denominator if there are weights."""
        weighted = unpack(self.data.element_spec).sample_weight is not None
        return RunOptions(gradient_reduce_op=ReduceOp.SUM if weighted else ReduceOp.MEAN)


@final
class Fit:
    """One call of `Model.fit`."""

    def __init__(
        self,
        trainee: Trainee,
        plan: FitPlan,
        *,
        model: TrainedModel,
        callbacks: CallbackList,
        reporter: Reporter,
        validate: Callable[[str], dict[str, Any]] | None,
    ) -> None:
        self._trainee = trainee
        self._trackers = trainee.compiled.trackers
        self._plan = plan
        self._model = model
        self._callbacks = callbacks
        self._reporter = reporter
        self._validate = validate
        self._total = plan.total()
        self._saw_data = False
        self._step = training_step(trainee.module, trainee.compiled)
        self._options = plan.options()

    def run(self) -> None:
        """All epochs. Waits for the steps of each."""
        logs: dict[str, Any] = {}
        self._model.stop_training = False
        self._callbacks.call("on_train_begin", {})
        with contextlib.ExitStack() as whole_fit:
            shared = None if self._plan.steps_per_epoch is None else self._open(whole_fit)
            for epoch in range(self._plan.epochs):
                with contextlib.ExitStack() as one_epoch:
                    logs = self._epoch(epoch, shared or self._open(one_epoch))
                if self._model.stop_training:
                    break
        self._callbacks.call("on_train_end", logs)

    def _open(self, stack: contextlib.ExitStack) -> Executions:
        iterator = stack.enter_context(opened(self._plan.data))
        return executions(
            self._trainee.strategy,
            self._step,
            iterator,
            steps_per_execution=self._trainee.compiled.steps_per_execution,
            num_batches=num_batches(self._plan.data),
            options=self._options,
        )

    def _epoch(self, epoch: int, calls: Executions) -> dict[str, Any]:
        label = f"Epoch {epoch + 1}/{self._plan.epochs}"
        self._trackers.reset()
        self._reporter.start(label, self._total)
        self._callbacks.call("on_epoch_begin", epoch, {})
        steps = self._steps(calls)
        logs = self._logs(steps, label) if steps else {}
        self._callbacks.call("on_epoch_end", epoch, logs)
        if steps:
            self._reporter.result(logs)
        return logs

    def _steps(self, calls: Executions) -> int:
        wanted = self._plan.steps_per_epoch
        steps = run_pass(
            calls,
            limit=wanted,
            begin=lambda step: self._callbacks.call("on_train_batch_begin", step, {}),
            end=self._after_execution,
            stopped=lambda: self._model.stop_training,
        )
        if not self._model.stop_training:
            self._after_last_batch(steps, wanted)
        return steps

    def _after_last_batch(self, steps: int, wanted: int | None) -> None:
        """The data ended, or the wanted number of steps is done."""
        if not self._saw_data:
            require_steps(steps, "fit")
        self._saw_data = True
        if wanted is None:
            self._total = steps  # of the next epoch, most likely
        elif steps < wanted:
            self._model.stop_training = True
            _warn_out_of_data(steps, wanted)

    def _after_execution(self, done: int) -> None:
        self._callbacks.batch_end("on_train_batch_end", done - 1, self._trackers.read)
        self._reporter.step(done, self._trackers.rows_and_logs)

    def _logs(self, steps: int, label: str) -> dict[str, Any]:
        rows, logs = self._trackers.rows_and_logs()
        self._reporter.stop(steps, rows)
        if self._validate is not None:
            found = self._validate(f"{label} validation")
            logs.update((f"val_{name}", value) for name, value in found.items())
        return logs


def _warn_out_of_data(steps: int, wanted: int) -> None:
    warnings.warn(
        f"The dataset ran out of batches: steps_per_epoch={wanted}, but only {steps} were left for this epoch. "
        "Training stops here. Leave steps_per_epoch out to train on whole passes, or add .repeat() to the dataset.",
        stacklevel=7,  # the caller of Model.fit
    )
