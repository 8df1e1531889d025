"""Callbacks that stop the training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.parameter_servers.sharded_embedding import SavedRows
from raydist.training.callbacks.callback import Callback
from raydist.training.callbacks.monitor import Mode, Monitor
from raydist.training.model_file import snapshot


@final
class EarlyStopping(Callback):
    """A callback that ends `fit` after `patience` epochs without improvement.

    Args:
        monitor: Name of the logged value: "val_loss", "loss", "val_multiclass_accuracy", ...
        min_delta: A change counts as an improvement if it is larger than this, >= 0.
        patience: Epochs to wait; 0 stops at the first epoch without improvement.
        verbose: 1 prints a line when the callback stops training and when it restores the state.
        mode: "min" or "max": the better direction. "auto": the direction of the metric of that name; for the loss, and
            for names that are no metric's, smaller is better.
        baseline: Value that must be improved on to reset the wait; None: improving on the best so far is enough.
        restore_best_weights: At the end, restore the module's parameters and buffers of the best epoch.
        start_from_epoch: Number of the first epoch, counted from 0, that is considered.

    Attributes:
        wait: Epochs since the last improvement.
        best: The best value so far; None before the first.
        best_epoch: Number of the best epoch, counted from 0; -1 before the first.
        stopped_epoch: Number of the epoch after which training stopped; 0 if it did not stop.

    Raises:
        InvalidArgumentError: `mode` is invalid, or a number is negative.

    >>> import numpy as np, torch
    >>> x = np.ones((4, 1), np.float32)
    >>> with rd.OneDeviceStrategy("cpu").scope():
    ...     model = rd.Model(torch.nn.Linear(1, 1))
    ...     model.compile(torch.optim.SGD(model.parameters(), lr=0.0), torch.nn.MSELoss())
    >>> stop = rd.EarlyStopping("loss", patience=2)
    >>> history = model.fit(rd.Dataset.from_tensor_slices((x, x)).batch(4), epochs=9, callbacks=[stop], verbose=False)
    >>> len(history.epoch), stop.best_epoch, stop.wait
    (3, 0, 2)

    Source: keras.callbacks.EarlyStopping.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0.0,
        patience: int = 0,
        verbose: int = 0,
        mode: Mode = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        if min_delta < 0 or patience < 0:
            raise InvalidArgumentError(f"min_delta and patience must be >= 0, got {min_delta!r} and {patience!r}.")
        self._monitor = Monitor(monitor, mode, min_delta, owner="EarlyStopping")
        self._patience = patience
        self._verbose = verbose
        self._baseline = baseline
        self._restore = restore_best_weights
        self._first = start_from_epoch
        self._start()

    def _start(self) -> None:
        self.wait = 0
        self.best_epoch = -1
        self.stopped_epoch = 0
        self._monitor.restart()
        self._best_state: dict[str, Any] | None = None

    @property
    def best(self) -> float | None:
        """The best value so far; None before the first.

        >>> print(rd.EarlyStopping("loss").best)
        None

        Source: keras.callbacks.EarlyStopping.
        """
        return self._monitor.best

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Reset the state of an earlier `fit`.

        Raises:
            InvalidArgumentError: `restore_best_weights` is set, and the module has rows that `state_dict()` lacks.
        """
        if self._restore and (tables := SavedRows(self.model.module).tables()):
            raise InvalidArgumentError(
                "restore_best_weights keeps what state_dict() gives, which has no rows of ShardedEmbeddings, but the "
                f"module has {', '.join(map(repr, tables))}. Leave it out, and have rd.ModelCheckpoint keep the best."
            )
        self._start()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Check the monitored value, and stop the training if it has not improved for too long.

        Warns if the value is not logged.
        """
        value = self._monitor.value(logs) if logs else None
        if value is not None and epoch >= self._first:
            self._judge(epoch, value)

    def _judge(self, epoch: int, value: float) -> None:
        self.wait += 1
        if self._monitor.update_best(value, self._metrics):
            self.best_epoch = epoch
            if self._restore:
                self._best_state = snapshot(self.model.module.state_dict())
            if self._baseline is None or self._monitor.improves(value, self._metrics, self._baseline):
                self.wait = 0
            return
        if self.wait >= self._patience and epoch > 0:  # as Keras does
            self.stopped_epoch = epoch
            self.model.stop_training = True

    def _metrics(self) -> Mapping[str, Any]:
        metrics: Mapping[str, Any] = self.model.metrics
        return metrics

    def on_train_end(self, logs: dict[str, Any]) -> None:
        """Restore the module's best state if `restore_best_weights` is set."""
        if self.stopped_epoch and self._verbose:
            print(f"Epoch {self.stopped_epoch + 1}: early stopping")
        if self._best_state is not None:
            if self._verbose:
                print(f"Restoring module state from the end of the best epoch: {self.best_epoch + 1}.")
            self.model.module.load_state_dict(self._best_state)
            self._best_state = None

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, the wait since then, and the module's best state."""
        best = {"wait": self.wait, "best": self.best, "best_epoch": self.best_epoch}
        return {**best, "stopped_epoch": self.stopped_epoch, "best_state": self._best_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of another EarlyStopping."""
        self.wait, self.best_epoch = state["wait"], state["best_epoch"]
        self.stopped_epoch, self._monitor.best = state["stopped_epoch"], state["best"]
        self._best_state = state["best_state"]


@final
class TerminateOnNaN(Callback):
    """A callback that ends `fit` when the loss is NaN or infinite.

    The callback reads the loss after every execution, which blocks for the steps: for steps of a few milliseconds set
    `steps_per_execution` in `compile`.

    Args:
        raise_error: Raise an error instead of ending `fit` normally.

    Raises:
        FailedPreconditionError: (in `fit`) the loss is NaN or infinite, with `raise_error`.

    >>> import torch
    >>> x = torch.full((4, 1), float("inf"))
    >>> with rd.OneDeviceStrategy("cpu").scope():
    ...     model = rd.Model(torch.nn.Linear(1, 1))
    ...     model.compile("sgd", "mse")
    >>> len(model.fit(x, x, epochs=3, callbacks=[rd.TerminateOnNaN()], verbose=False).epoch)
    Batch 0: Invalid loss, terminating training
    1

    Source: keras.callbacks.TerminateOnNaN.
    """

    def __init__(self, raise_error: bool = False) -> None:
        self._raise_error = raise_error

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        """Check the loss. Blocks for the dispatched steps."""
        loss = float(logs["loss"])
        if math.isfinite(loss):
            return
        if self._raise_error:
            raise FailedPreconditionError(
                f"The loss must be a finite number, got {loss} after batch {batch}. Use a smaller learning rate or "
                "clip_norm, and look for such values in the data; RunOptions(on_nonfinite=) names gradients."
            )
        print(f"Batch {batch}: Invalid loss, terminating training")
        self.model.stop_training = True
