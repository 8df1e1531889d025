"""Stop training when a logged value gets no better."""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal, final

from raydist.errors import InvalidArgumentError
from raydist.training.callbacks import Callback
from raydist.training.saving import snapshot

__all__ = ["EarlyStopping"]


@final
class EarlyStopping(Callback):
    """Ends `fit` after `patience` epochs without improvement. A callback.

    Args:
        monitor: Name of the logged value: "val_loss", "loss", "val_multiclass_accuracy", ...
        min_delta: A change counts as an improvement if it is larger than this, >= 0.
        patience: Epochs to wait; 0 stops at the first epoch that is no better.
        mode: "min" or "max": which direction is better.
        restore_best_weights: Give the module its parameters and buffers of the best epoch at the end.

    Attributes:
        wait: Epochs since the last improvement.
        best_epoch: Number of the best epoch, counted from 0; -1 before the first.

    Raises:
        InvalidArgumentError: `mode` is another word, or a number is negative.

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
        *,
        min_delta: float = 0.0,
        patience: int = 0,
        mode: Literal["min", "max"] = "min",
        restore_best_weights: bool = False,
    ) -> None:
        if mode not in ("min", "max"):
            raise InvalidArgumentError(f'mode must be "min" or "max", got {mode!r}.')
        if min_delta < 0 or patience < 0:
            raise InvalidArgumentError(f"min_delta and patience must be >= 0, got {min_delta!r} and {patience!r}.")
        self._monitor = monitor
        self._min_delta = min_delta
        self._patience = patience
        self._sign = 1.0 if mode == "min" else -1.0
        self._restore = restore_best_weights
        self._start()

    def _start(self) -> None:
        self.wait = 0
        self.best_epoch = -1
        self._best = math.inf  # of sign * value: lower is better
        self._best_state: dict[str, Any] | None = None

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Forgets what an earlier `fit` has seen.

        Args:
            logs: Not used.

        Source: keras.callbacks.EarlyStopping.on_train_begin.

        >>> stop = rd.EarlyStopping("loss")
        >>> stop.on_train_begin({})
        >>> stop.wait, stop.best_epoch
        (0, -1)
        """
        self._start()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Looks at the monitored value, and stops the training if it has not improved for too long.

        A value that is not logged is a warning.

        Args:
            epoch: Its number, counted from 0.
            logs: Log name -> value; an epoch without data has none and does not count.

        Source: keras.callbacks.EarlyStopping.on_epoch_end.

        >>> stop = rd.EarlyStopping("loss", patience=5)
        >>> stop.on_epoch_end(0, {"loss": 0.5})
        >>> stop.on_epoch_end(1, {"loss": 0.75})
        >>> stop.best_epoch, stop.wait
        (0, 1)
        """
        if not logs:
            return
        if self._monitor not in logs:
            warnings.warn(
                f"EarlyStopping monitors {self._monitor!r}, which is not among the logs {sorted(logs)}.",
                stacklevel=2,
            )
            return
        self._judge(epoch, self._sign * float(logs[self._monitor]))

    def _judge(self, epoch: int, value: float) -> None:
        if value < self._best - self._min_delta:
            self._best, self.best_epoch, self.wait = value, epoch, 0
            if self._restore:
                self._best_state = snapshot(self.model.module.state_dict())
            return
        self.wait += 1
        if self.wait >= self._patience:
            self.model.stop_training = True

    def on_train_end(self, logs: dict[str, Any]) -> None:
        """Gives the module back its best state, where `restore_best_weights` asks for it.

        Args:
            logs: Not used.

        Source: keras.callbacks.EarlyStopping.on_train_end.

        >>> rd.EarlyStopping("loss").on_train_end({})  # nothing to restore
        """
        if self._best_state is not None:
            self.model.module.load_state_dict(self._best_state)
            self._best_state = None
