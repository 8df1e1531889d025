"""A callback that saves the model during training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, final

from raydist.checkpoints.checkpoint import Checkpoint
from raydist.errors import InvalidArgumentError
from raydist.pipelines.formats.files import shown_uri
from raydist.training.callbacks.callback import Callback
from raydist.training.callbacks.monitor import Mode, Monitor

__all__ = ["ModelCheckpoint"]


@final
class ModelCheckpoint(Callback):
    """A callback that saves the model at intervals, or when it is the best so far.

    A path that ends in ".safetensors" becomes a file of `Model.save`, for `rd.Model.load`; any other path becomes a
    directory of `rd.Checkpoint(**model.checkpoint_objects())`. To resume an interrupted training, use
    `fit(checkpoint=...)` or :class:`BackupAndRestore`.

    Args:
        filepath: Path of the saves. "{epoch}", "{batch}" and names of logs are replaced, as by `str.format`:
            "{epoch:02d}-{val_loss:.2f}.safetensors"; epochs and batches count from 1. Checkpoints may be saved at a URI
            that fsspec supports.
        monitor: Name of the logged value that decides which model is best.
        verbose: 1 prints a line at each save.
        save_best_only: Save only if the value is better than all before.
        save_weights_only: Do not save the optimizer.
        mode: "min" or "max": the better direction; "auto" as for :class:`EarlyStopping`.
        save_freq: "epoch": after every epoch; a number: after so many batches, with the logs of the epoch so far.
        initial_value_threshold: Value that the first logged value must improve on.

    Raises:
        InvalidArgumentError: `save_freq` or `mode` is invalid; (in `fit`) the path contains a name that is not logged.
        OSError: (in `fit`) the path cannot be written.

    >>> import os, tempfile, torch
    >>> folder, x = tempfile.mkdtemp(), torch.ones(4, 1)
    >>> with rd.OneDeviceStrategy("cpu").scope():
    ...     model = rd.Model(torch.nn.Linear(1, 1))
    ...     model.compile("sgd", "mse")
    >>> save = rd.ModelCheckpoint(f"{folder}/{{epoch:02d}}.safetensors")
    >>> _ = model.fit(x, x, epochs=2, callbacks=[save], verbose=False)
    >>> sorted(os.listdir(folder))
    ['01.safetensors', '02.safetensors']

    Source: keras.callbacks.ModelCheckpoint.
    """

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: Mode = "auto",
        save_freq: int | str = "epoch",
        initial_value_threshold: float | None = None,
    ) -> None:
        if save_freq != "epoch" and not (type(save_freq) is int and save_freq >= 1):
            raise InvalidArgumentError(f'save_freq must be "epoch" or a number of batches >= 1, got {save_freq!r:.80}.')
        self._monitor = Monitor(monitor, mode, threshold=initial_value_threshold, owner="ModelCheckpoint")
        self._path = os.fspath(filepath)
        self._verbose = verbose
        self._best_only = save_best_only
        self._weights_only = save_weights_only
        self._every = save_freq if isinstance(save_freq, int) else None
        self._epoch = 0
        self._batches = 0  # since the last save
        self._last_batch = -1

    @property
    def best(self) -> float | None:
        """The best value so far; None before the first value if there is no threshold.

        >>> rd.ModelCheckpoint("best", initial_value_threshold=0.5).best
        0.5

        Source: keras.callbacks.ModelCheckpoint.
        """
        return self._monitor.best

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """Record the epoch for the path.

        Args:
            epoch: Number of the epoch, counted from 0.
            logs: Not used.

        Source: keras.callbacks.ModelCheckpoint.on_epoch_begin.

        >>> rd.ModelCheckpoint("{epoch:02d}").on_epoch_begin(3, {})  # a file saved in it is called 04
        """
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        """Save if enough batches have passed. Blocks for the dispatched steps in that case.

        Args:
            batch: Number of the execution's last batch in the epoch, counted from 0.
            logs: Values for the path and the monitor.

        Source: keras.callbacks.ModelCheckpoint.on_train_batch_end.
        """
        if self._every is None:
            return
        self._batches += batch + 1 if batch <= self._last_batch else batch - self._last_batch
        self._last_batch = batch
        if self._batches >= self._every:
            self._batches = 0
            self._save(logs, batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Save, unless the callback saves after batches, or the model is not better.

        Args:
            epoch: Number of the epoch, counted from 0.
            logs: Log name -> value. An epoch without data has no logs and is not saved.

        Source: keras.callbacks.ModelCheckpoint.on_epoch_end.
        """
        self._epoch = epoch
        if self._every is None and logs:
            self._save(logs, None)

    def _save(self, logs: Mapping[str, Any], batch: int | None) -> None:
        if self._best_only and not self._is_best(logs):
            return
        path = self._filled(logs, batch)
        self._say(f"saving model to {shown_uri(path)}")
        if path.endswith(".safetensors"):
            self.model.save(path, optimizer=not self._weights_only)
            return
        objects = self.model.checkpoint_objects()
        Checkpoint(**({"model": objects["model"]} if self._weights_only else objects)).save(path)

    def _is_best(self, logs: Mapping[str, Any]) -> bool:
        value = self._monitor.watched(logs, so=" It saves whatever it is.")
        if value is None:
            return True
        before = self._monitor.best
        if not self._monitor.takes(value, lambda: self.model.metrics):
            self._say(f"{self._monitor.name} did not improve from {_text(before)}")
            return False
        self._say(f"{self._monitor.name} improved from {_text(before)} to {value:.5f}")
        return True

    def _say(self, what: str) -> None:
        if self._verbose:
            print(f"Epoch {self._epoch + 1}: {what}")

    def _filled(self, logs: Mapping[str, Any], batch: int | None) -> str:
        if "{" not in self._path:
            return self._path
        batches = {} if batch is None else {"batch": batch + 1}
        try:
            return self._path.format(**{"epoch": self._epoch + 1, **batches, **logs})
        except (KeyError, IndexError, ValueError) as error:
            raise InvalidArgumentError(
                f"filepath may name epoch{', batch' if batches else ''} and what is logged, {sorted(logs)}, got "
                f"{shown_uri(self._path)!r} ({error}). Correct it, or log that value in a callback before."
            ) from None

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, and the number of batches since the last save.

        Returns:
            JSON values.

        Source: raydist's own.

        >>> rd.ModelCheckpoint("best", initial_value_threshold=0.5).state_dict()["best"]
        0.5
        """
        return {"best": self._monitor.best, "batches": self._batches, "last_batch": self._last_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of another ModelCheckpoint.

        Args:
            state: Result of `state_dict`.

        Source: raydist's own.

        >>> save = rd.ModelCheckpoint("best")
        >>> save.load_state_dict({**save.state_dict(), "best": 0.25})
        >>> save.best
        0.25
        """
        self._monitor.best, self._batches, self._last_batch = state["best"], state["batches"], state["last_batch"]


def _text(value: float | None) -> str:
    return "None" if value is None else f"{value:.5f}"
