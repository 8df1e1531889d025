"""Callbacks that count global steps, with the names and arguments of TensorFlow's session hooks.

Each works with `Model.fit` and with estimators. The driver counts the steps it dispatches: reading the global step's
variable would wait for the replicas in each step.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

from raydist.checkpoints.checkpoint import Checkpoint
from raydist.checkpoints.manager import CheckpointManager
from raydist.checkpoints.saves import SaveHandle
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.summary.scalars import scalar
from raydist.summary.writer import SummaryWriter, create_file_writer
from raydist.training.callbacks.callback import Callback
from raydist.training.fit_checkpoints import FitManager

_log = logging.getLogger("raydist")


def _require_one(**given: float | None) -> None:
    """Raise InvalidArgumentError unless exactly one of two arguments is given, and > 0."""
    (first, one), (second, other) = given.items()
    if (one is None) == (other is None) or not (one or other or 0) > 0:
        raise InvalidArgumentError(f"Give {first} or {second} as a number > 0, got {one!r} and {other!r}.")


class StepHook(Callback):
    """A callback that knows the global step, and acts at every n-th step or every few seconds.

    Attributes:
        global_step: The global step after the steps dispatched so far.
    """

    def __init__(self, steps: int | None = None, seconds: float | None = None) -> None:
        self.global_step = self._first = 0
        self._steps, self._seconds, self._last_s = steps, seconds or math.inf, time.monotonic()

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        self.global_step = int(self.model.strategy._make_counter().value)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        self._first = batch

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        before, self.global_step = self.global_step, self.global_step + batch + 1 - self._first
        by_steps = self._steps is not None and before // self._steps < self.global_step // self._steps
        if by_steps or time.monotonic() - self._last_s >= self._seconds:
            self._last_s = time.monotonic()
            self._act(logs)

    def _act(self, logs: Mapping[str, Any]) -> None:
        """Do what is due at this step."""


@final
class StopAtStepHook(StepHook):
    """A callback that ends training at a global step.

    Args:
        num_steps: Number of steps from the beginning of `fit`. A `fit` that resumes from a checkpoint within these
            steps completes them.
        last_step: The global step to stop at; instead of `num_steps`.

    >>> import torch
    >>> x = torch.zeros(8, 1)
    >>> with rd.OneDeviceStrategy("cpu").scope():
    ...     model = rd.Model(torch.nn.Linear(1, 1))
    ...     model.compile("sgd", "mse")
    >>> stop = rd.StopAtStepHook(num_steps=3)
    >>> _ = model.fit(x, x, batch_size=1, callbacks=[stop], verbose=False)
    >>> stop.global_step
    3

    Source: tf.estimator.StopAtStepHook.
    """

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        _require_one(num_steps=num_steps, last_step=last_step)
        super().__init__(steps=1)
        self._num_steps, self._last_step = num_steps, last_step

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        super().on_train_begin(logs)
        if self._num_steps is not None:
            self._last_step = self.global_step + self._num_steps

    def _act(self, logs: Mapping[str, Any]) -> None:
        if self._last_step is not None and self.global_step >= self._last_step:
            self.model.stop_training = True

    def state_dict(self) -> dict[str, Any]:
        return {"last_step": self._last_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._num_steps is not None:
            self._last_step = state["last_step"]


@final
class LoggingTensorHook(StepHook):
    """A callback that writes logged values to the logger "raydist", at level INFO.

    Reading the values waits for the dispatched steps. They are means over the epoch so far.

    Args:
        tensors: Names of logged values; or a dict of titles and names.
        every_n_iter: Global steps between two lines.
        every_n_secs: Seconds between two lines; instead of `every_n_iter`.
        at_end: Also write a line at the end.
        formatter: Makes the text from a dict of titles and values; None: "loss = 0.5, step = 100".

    >>> hook = rd.LoggingTensorHook(["loss"], every_n_iter=100)

    Source: tf.estimator.LoggingTensorHook.
    """

    def __init__(
        self,
        tensors: Sequence[str] | Mapping[str, str],
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        at_end: bool = False,
        formatter: Callable[[dict[str, Any]], str] | None = None,
    ) -> None:
        _require_one(every_n_iter=every_n_iter, every_n_secs=every_n_secs)
        super().__init__(every_n_iter, every_n_secs)
        self._names = dict(tensors) if isinstance(tensors, Mapping) else {name: name for name in tensors}
        self._at_end, self._formatter = at_end, formatter

    def _act(self, logs: Mapping[str, Any]) -> None:
        if missing := sorted(set(self._names.values()) - set(logs)):
            raise InvalidArgumentError(f"tensors must be names of logs, {sorted(logs)}, got {missing[0]!r}.")
        values = {title: logs[name] for title, name in self._names.items()}
        shown = (f"{name} = {value}" for name, value in {**values, "step": self.global_step}.items())
        _log.info("%s", ", ".join(shown) if self._formatter is None else self._formatter(values))

    def on_train_end(self, logs: dict[str, Any]) -> None:
        if self._at_end:
            self._act(logs)


@final
class NanTensorHook(Callback):
    """A callback that ends training when the loss is NaN. It reads the loss after every execution, which waits.

    Args:
        loss_tensor: Name of the logged loss.
        fail_on_nan_loss: Raise a FailedPreconditionError; False: end training normally.

    >>> rd.NanTensorHook().on_train_batch_end(0, {"loss": 0.5})

    Source: tf.estimator.NanTensorHook.
    """

    def __init__(self, loss_tensor: str = "loss", fail_on_nan_loss: bool = True) -> None:
        self._name, self._fails = loss_tensor, fail_on_nan_loss

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        if not math.isnan(logs[self._name]):
            return
        if self._fails:
            raise FailedPreconditionError(
                f"The loss must be a number, got NaN in batch {batch}. Use a smaller learning rate, and look for such "
                "values in the data."
            )
        _log.error("The loss is NaN in batch %s: training ends.", batch)
        self.model.stop_training = True


class SummaryHook(StepHook):
    """A callback that writes curves into an event file; those of a training that resumes go on."""

    def __init__(self, steps: int | None, seconds: float | None, output_dir: str | os.PathLike[str] | None) -> None:
        if output_dir is None:
            raise InvalidArgumentError("output_dir must be the directory of the summaries, got None. Name one.")
        super().__init__(steps, seconds)
        self._directory, self._writer = output_dir, None

    _writer: SummaryWriter | None

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        super().on_train_begin(logs)
        done = self.global_step
        self._writer = create_file_writer(self._directory, purge_step=done + 1 if done else None)

    def _write(self, values: Mapping[str, Any]) -> None:
        if self._writer is not None:
            with self._writer.as_default():
                for name, value in values.items():
                    if isinstance(value, int | float):
                        scalar(name, value, step=self.global_step)

    def on_train_end(self, logs: dict[str, Any]) -> None:
        if self._writer is not None:
            self._writer.close()


@final
class SummarySaverHook(SummaryHook):
    """A callback that writes the loss and metrics, means over the epoch so far, for TensorBoard.

    Args:
        save_steps: Global steps between two points.
        save_secs: Seconds between two points; instead of `save_steps`.
        output_dir: Directory of the event file.

    >>> hook = rd.SummarySaverHook(save_steps=100, output_dir="logs")

    Source: tf.estimator.SummarySaverHook.
    """

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        _require_one(save_steps=save_steps, save_secs=save_secs)
        super().__init__(save_steps, save_secs, output_dir)

    def _act(self, logs: Mapping[str, Any]) -> None:
        self._write(logs)


@final
class StepCounterHook(SummaryHook):
    """A callback that writes the curve `global_step/sec`.

    Args:
        every_n_steps: Global steps between two points.
        every_n_secs: Seconds between two points; instead of `every_n_steps`.
        output_dir: Directory of the event file.

    >>> hook = rd.StepCounterHook(every_n_steps=100, output_dir="logs")

    Source: tf.estimator.StepCounterHook.
    """

    def __init__(
        self,
        every_n_steps: int | None = 100,
        every_n_secs: float | None = None,
        output_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        _require_one(every_n_steps=every_n_steps, every_n_secs=every_n_secs)
        super().__init__(every_n_steps, every_n_secs, output_dir)
        self._counted = (0, 0.0)  # global step and time of the last point

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        super().on_train_begin(logs)
        self._counted = self.global_step, time.monotonic()

    def _act(self, logs: Mapping[str, Any]) -> None:
        (step, since), self._counted = self._counted, (self.global_step, time.monotonic())
        self._write({"global_step/sec": (self.global_step - step) / max(self._counted[1] - since, 1e-9)})


@final
class CheckpointSaverHook(Callback):
    """A callback that saves the whole state of a `fit` at intervals and at its end, and resumes from the newest save.

    Among the hooks of `Estimator.train` it replaces the saves that `RunConfig` asks for. Checkpoints are named after
    the global step: "ckpt-1000".

    Args:
        checkpoint_dir: Directory of the checkpoints.
        save_secs: Seconds between two checkpoints.
        save_steps: Steps between two checkpoints; instead of `save_secs`.
        max_to_keep: Number of newest checkpoints to keep; None: all.
        listeners: Functions that are called with the :class:`SaveHandle` of each save, when it has begun.

    Attributes:
        directory: The directory.

    >>> import os, tempfile, torch
    >>> folder, x = tempfile.mkdtemp(), torch.ones(8, 1)
    >>> with rd.OneDeviceStrategy("cpu").scope():
    ...     model = rd.Model(torch.nn.Linear(1, 1))
    ...     model.compile("sgd", "mse")
    >>> save = rd.CheckpointSaverHook(folder, save_steps=3)
    >>> _ = model.fit(x, x, batch_size=1, callbacks=[save], verbose=False)
    >>> sorted(name for name in os.listdir(folder) if name.startswith("ckpt"))
    ['ckpt-3', 'ckpt-6', 'ckpt-8']

    Source: tf.estimator.CheckpointSaverHook.
    """

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        save_secs: float | None = None,
        save_steps: int | None = None,
        max_to_keep: int | None = 5,
        listeners: Sequence[Callable[[SaveHandle], object]] = (),
    ) -> None:
        _require_one(save_secs=save_secs, save_steps=save_steps)
        self.directory = os.fspath(checkpoint_dir)
        self._secs, self._steps, self._max_to_keep = save_secs, save_steps, max_to_keep
        self._listeners, self._resumes = list(listeners), True

    @contextlib.contextmanager
    def _during_training(self, *, resume: bool, listeners: Sequence[Callable[[SaveHandle], object]]) -> Iterator[None]:
        """Resume only if asked to, and call further listeners, for a `fit` in the `with` block."""
        before = self._resumes, self._listeners
        self._resumes, self._listeners = resume, [*self._listeners, *listeners]
        try:
            yield
        finally:
            self._resumes, self._listeners = before

    def _saver(self, new_checkpoint: Callable[[], Checkpoint], state: Any) -> FitManager:
        manager = CheckpointManager(
            new_checkpoint(),
            self.directory,
            self._max_to_keep,
            step_counter=lambda: state.global_step,
            checkpoint_interval=self._steps,
            interval_s=self._secs,
        )
        return FitManager(manager, resume=self._resumes, fallback=True, within_epochs=True, saved=self._tell)

    def _tell(self, handle: SaveHandle | None) -> None:
        for listener in self._listeners:
            if handle is not None:
                listener(handle)
