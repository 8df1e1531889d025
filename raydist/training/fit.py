"""`fit`: epochs of training steps, each followed by its validation."""

from __future__ import annotations

import contextlib
from collections.abc import Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from raydist.core.errors import InvalidArgumentError
from raydist.core.values import ReduceOp
from raydist.options import RunOptions
from raydist.strategies.functions import step_counting
from raydist.training.elements import ClassWeights, unpack
from raydist.training.evaluation import Evaluation
from raydist.training.fit_checkpoints import FitCheckpoints, FitState
from raydist.training.passes import (
    Executions,
    num_batches,
    opened,
    require_at_least,
    require_finite,
    require_steps,
    run_executions,
    warn_out_of_data,
)
from raydist.training.progress import Reporter
from raydist.training.settings import Trainee
from raydist.training.steps import training_step

if TYPE_CHECKING:
    from raydist.distributed_dataset import DistributedDataset
    from raydist.training.callbacks.callback import CallbackList
    from raydist.training.progress import View


@final
@dataclass(frozen=True, slots=True)
class FitPlan:
    """The data and length of a training.

    Attributes:
        data: The training data.
        epochs: Number of epochs, >= 1.
        steps_per_epoch: Batches per epoch, >= 1; one iterator then continues from epoch to epoch. None: an epoch
            iterates over all data.
        initial_epoch: Number of the first epoch, counted from 0; earlier epochs are done already.
        validation_freq: Epochs between validations, or the numbers, from 1, of the epochs to validate.
        class_weights: Weights of rows by class; empty: all rows have the same weight.
        held_out: The validation data; None without a validation.
        validation_steps: Batches of a validation, >= 1; None: all batches.
    """

    data: DistributedDataset
    epochs: int
    steps_per_epoch: int | None
    initial_epoch: int = 0
    validation_freq: int | Container[int] = 1
    class_weights: ClassWeights = field(default_factory=ClassWeights)
    held_out: DistributedDataset | None = None
    validation_steps: int | None = None

    def __post_init__(self) -> None:
        require_at_least("epochs", self.epochs)
        require_at_least("steps_per_epoch", self.steps_per_epoch)
        require_at_least("initial_epoch", self.initial_epoch, 0)
        require_at_least("validation_steps", self.validation_steps)
        if isinstance(self.validation_freq, int):
            require_at_least("validation_freq", self.validation_freq)
        require_finite(self.data, "fit without steps_per_epoch", self.steps_per_epoch)

    def total(self) -> int | None:
        """Return the number of batches of one epoch, if known."""
        return num_batches(self.data) if self.steps_per_epoch is None else self.steps_per_epoch

    def validates(self, epoch: int) -> bool:
        """Return True if a validation follows an epoch, counted from 0."""
        if isinstance(self.validation_freq, int):
            return (epoch + 1) % self.validation_freq == 0
        return epoch + 1 in self.validation_freq

    def require_elements(self, *, own_loss: bool) -> None:
        """Raise InvalidArgumentError or SpecError unless the elements fit the loss of `compile`."""
        if own_loss and self.class_weights:
            raise InvalidArgumentError(
                'class_weight needs a loss of (prediction, target), got loss="model". Weigh the classes in the module.'
            )
        if own_loss:
            return
        if unpack(self.data.element_spec).sample_weight is not None and self.class_weights:
            raise InvalidArgumentError(
                "Rows are weighted once, by class_weight or by the sample_weight of the elements, got both. Multiply "
                "the classes' weights into sample_weight with dataset.map."
            )


@final
class Fit:
    """One call of `Model.fit`: its epochs, each followed by a validation if there is one."""

    def __init__(
        self,
        trainee: Trainee,
        plan: FitPlan,
        *,
        model: Any,
        callbacks: CallbackList,
        view: View,
        state: FitState,
        checkpoints: FitCheckpoints,
    ) -> None:
        plan.require_elements(own_loss=trainee.compiled.loss is None)
        state.total, state.epoch = plan.total(), plan.initial_epoch
        self._trainee = trainee
        self._trackers = trainee.compiled.trackers
        self._plan = plan
        self._model = model
        self._callbacks = callbacks
        self._reporter = Reporter(view)
        self._evaluation = Evaluation(trainee, callbacks, Reporter(view))
        self._state = state
        self._checkpoints = checkpoints
        count = step_counting(trainee.strategy)
        self._step = training_step(trainee, plan.class_weights, count)

    def run(self) -> None:
        """Run all epochs, or the remaining ones after a checkpoint. Blocks until their steps are done."""
        self._model.stop_training = False
        with self._state.without_callbacks():
            resumed = self._checkpoints.restore()
        self._callbacks.call("on_train_begin", {})
        if resumed:
            self._checkpoints.restore_again()
        if self._state.is_within_epoch or not self._is_done():
            self._run_epochs(resumed)
        elif resumed:
            self._model.stop_training = self._state.stop
            self._checkpoints.warn_nothing_is_left(self._plan.epochs)
        self._callbacks.call("on_train_end", self._state.last_logs)
        self._checkpoints.finish()

    def _is_done(self) -> bool:
        return self._state.stop or self._state.epoch >= self._plan.epochs

    def _run_epochs(self, resumed: bool) -> None:
        with contextlib.ExitStack() as stack:
            # With steps_per_epoch one iterator serves all epochs; otherwise each epoch opens its own.
            shared: Executions | None = None
            self._begin_epoch(within=resumed and self._state.is_within_epoch)
            while True:
                if self._plan.steps_per_epoch is not None:
                    shared = shared or self._open_data(stack)
                self._run_epoch(shared)
                if self._is_done():
                    break
                self._begin_epoch(within=False)

    def _begin_epoch(self, *, within: bool) -> None:
        """Begin an epoch, or one `within` which the checkpoint was saved."""
        if not within:
            self._trackers.reset()
        self._reporter.start(self._label(), self._state.total)
        self._callbacks.call("on_epoch_begin", self._state.epoch, {})
        if within:  # the hook was called before the checkpoint, too
            self._checkpoints.restore_again()
            self._model.stop_training = self._state.stop

    def _label(self) -> str:
        return f"Epoch {self._state.epoch + 1}/{self._plan.epochs}"

    def _run_epoch(self, shared: Executions | None) -> None:
        logs = self._train_and_validate(shared)
        own = dict(logs)  # callbacks add to the logs
        self._callbacks.call("on_epoch_end", self._state.epoch, logs)
        if logs:
            self._reporter.result(logs)
        self._state.end_epoch(own)
        self._state.stop = self._model.stop_training
        self._checkpoints.after_epoch(logs)

    def _train_and_validate(self, shared: Executions | None) -> dict[str, Any]:
        """Train one epoch and validate the model; return the logs of both, or {} without data."""
        state, plan = self._state, self._plan
        if state.logs is None:
            # Close the iterator here: if replicas loop, its end may not be seen, and later saves must not resume from
            # it.
            with contextlib.ExitStack() as stack:
                steps = self._train(shared or self._open_data(stack))
                if not steps:
                    return {}
                rows, logs = self._trackers.rows_and_logs()
                self._callbacks.call("_end_epoch")
            self._reporter.stop(steps, rows)
        else:  # a checkpoint was saved during the validation: the data is at the end of this epoch already
            logs = state.logs
        state.end_training(logs)
        logs = dict(logs)
        if plan.held_out is not None and plan.validates(state.epoch):
            found = self._evaluation.run(plan.held_out, f"{self._label()} validation", plan.validation_steps)
            logs.update((f"val_{name}", value) for name, value in found.items())
        return logs

    def _open_data(self, stack: contextlib.ExitStack) -> Executions:
        """Return the executions over the rest of the data; `stack` closes their iterator."""
        state, plan, strategy = self._state, self._plan, self._trainee.strategy
        if state.batches and not plan.data._epochs.has_rest:  # the data had ended before the checkpoint
            return Executions(strategy, self._step, iter(()))
        known = num_batches(plan.data)
        done = state.batches if plan.steps_per_epoch is None else state.drawn
        return Executions(
            strategy,
            self._step,
            stack.enter_context(opened(plan.data)),
            steps_per_execution=self._trainee.compiled.steps_per_execution,
            num_batches=None if known is None else max(0, known - done),
            options=RunOptions(gradient_reduce_op=ReduceOp.SUM),  # losses have global denominators
        )

    def _train(self, executions: Executions) -> int:
        """Run the training steps of one epoch; return their number."""
        wanted = self._plan.steps_per_epoch
        steps = run_executions(
            executions,
            limit=wanted,
            begin=self._before_execution,
            end=self._after_execution,
            stopped=lambda: self._model.stop_training,
            start=self._state.batches,
        )
        update = self._trainee.compiled.update
        if update.accumulation is not None:
            self._trainee.strategy.run(update.finish)
        if not self._model.stop_training:
            self._after_last_batch(steps, wanted)
        return steps

    def _before_execution(self, step: int) -> None:
        # With single steps the driver has drawn the batch already, and a hook may save a checkpoint before the step.
        is_drawn = self._trainee.compiled.steps_per_execution == 1
        with self._checkpoints.before_draw(self._plan.data) if is_drawn else contextlib.nullcontext():
            self._callbacks.call("on_train_batch_begin", step, {})

    def _after_execution(self, done: int) -> None:
        count, self._state.batches = done - self._state.batches, done
        self._state.drawn += count
        if (scheduler := self._trainee.compiled.scheduler_here) is not None:
            for _ in range(count):
                scheduler.step()
        self._trainee.strategy._add_steps(count)
        self._callbacks.batch_end("on_train_batch_end", done - 1, self._trackers.read)
        self._reporter.step(done, self._trackers.rows_and_logs)
        self._state.stop = self._model.stop_training
        self._checkpoints.after_execution()

    def _after_last_batch(self, steps: int, wanted: int | None) -> None:
        """Handle the end of the data, or of the wanted number of steps."""
        if not self._state.saw_data:
            require_steps(steps, "fit")
        self._state.saw_data = True
        if wanted is None:
            self._state.total = steps  # most likely also the total of the next epoch
        elif steps < wanted:
            self._model.stop_training = self._state.stop = True
            warn_out_of_data("steps_per_epoch", wanted, steps, "for this epoch. Training stops here.")
