"""Callbacks that save the model or the state of a running `fit`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, final

from raydist.checkpoints.checkpoint import Checkpoint
from raydist.checkpoints.manager import CheckpointManager
from raydist.core.errors import InvalidArgumentError
from raydist.pipelines.formats.files import shown_uri
from raydist.training.callbacks.callback import Callback
from raydist.training.callbacks.monitor import Mode, Monitor


@final
class ModelCheckpoint(Callback):
    """A callback that saves the model at intervals, or whenever a logged value is the best so far.

    If the path ends in ".safetensors", `Model.save` writes a file for `rd.Model.load`. Otherwise a checkpoint of
    `rd.Checkpoint(**model.checkpoint_objects())` is written to a directory. To resume an interrupted training, use
    `fit(checkpoint=...)` or :class:`BackupAndRestore`.

    Args:
        filepath: Path of the saves. `str.format` replaces "{epoch}", "{batch}" and names of logs, as in
            "{epoch:02d}-{val_loss:.2f}.safetensors"; epochs and batches count from 1. The path of a checkpoint may be a
            URI that fsspec supports.
        monitor: Name of the logged value that decides which model is best.
        verbose: 1 prints a line at each save.
        save_best_only: Save only if the value is the best so far.
        save_weights_only: Do not save the optimizer.
        mode: "min" or "max": the better direction; "auto" as for :class:`EarlyStopping`.
        save_freq: "epoch": after every epoch. A number: after that many batches, with the logs of the epoch so far.
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
        """Record the epoch for the path."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        """Save if enough batches have passed. A save blocks until the dispatched steps have run."""
        if self._every is None:
            return
        self._batches += batch + 1 if batch <= self._last_batch else batch - self._last_batch
        self._last_batch = batch
        if self._batches >= self._every:
            self._batches = 0
            self._save(logs, batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Save, unless `save_freq` is a number, or `save_best_only` is set and the model is not the best so far."""
        self._epoch = epoch
        if self._every is None and logs:
            self._save(logs, None)

    def _save(self, logs: Mapping[str, Any], batch: int | None) -> None:
        if self._best_only and not self._is_best(logs):
            return
        path = self._format_path(logs, batch)
        self._print(f"saving model to {shown_uri(path)}")
        if path.endswith(".safetensors"):
            self.model.save(path, optimizer=not self._weights_only)
            return
        objects = self.model.checkpoint_objects()
        Checkpoint(**({"model": objects["model"]} if self._weights_only else objects)).save(path)

    def _is_best(self, logs: Mapping[str, Any]) -> bool:
        value = self._monitor.value(logs, consequence=" It saves whatever it is.")
        if value is None:
            return True
        before = self._monitor.best
        if not self._monitor.update_best(value, lambda: self.model.metrics):
            self._print(f"{self._monitor.name} did not improve from {_format_value(before)}")
            return False
        self._print(f"{self._monitor.name} improved from {_format_value(before)} to {value:.5f}")
        return True

    def _print(self, what: str) -> None:
        if self._verbose:
            print(f"Epoch {self._epoch + 1}: {what}")

    def _format_path(self, logs: Mapping[str, Any], batch: int | None) -> str:
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
        """Return the best value, and the number of batches since the last save."""
        return {"best": self._monitor.best, "batches": self._batches, "last_batch": self._last_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of another ModelCheckpoint."""
        self._monitor.best, self._batches, self._last_batch = state["best"], state["batches"], state["last_batch"]


def _format_value(value: float | None) -> str:
    return "None" if value is None else f"{value:.5f}"


@final
class BackupAndRestore(Callback):
    """A callback that resumes an interrupted `fit` from its last save.

    Run the program again: `fit` restores weights, optimizer, metrics, callbacks, history and the position in the data,
    and continues with the batch after the last save. Saves run after all callbacks, independent of this callback's
    position in the list. `fit(checkpoint=...)` does the same and keeps the checkpoints.

    Args:
        backup_dir: Directory for the saves: a path, or a URI that fsspec supports. Must not be used for anything else.
        save_freq: "epoch": save after every epoch. A number: save after that many batches. False: save only on
            preemption (see :class:`CheckpointManager`). The other settings also save on preemption.
        double_checkpoint: Also keep the previous checkpoint, and resume from it if the last one is damaged.
        delete_checkpoint: Remove the saves once training has ended normally.

    Raises:
        InvalidArgumentError: `backup_dir` is empty, or `save_freq` is invalid.
        FailedPreconditionError: (in `fit`) another process writes into the directory.

    >>> import os, tempfile, torch
    >>> folder, x = tempfile.mkdtemp(), torch.ones(4, 1)
    >>> def train(epochs):
    ...     with rd.OneDeviceStrategy("cpu").scope():
    ...         model = rd.Model(torch.nn.Linear(1, 1))
    ...         model.compile("sgd", "mse")
    ...     backup = rd.BackupAndRestore(folder, delete_checkpoint=False)
    ...     return model.fit(x, x, epochs=epochs, callbacks=[backup], verbose=False)
    >>> [len(train(epochs).epoch) for epochs in (1, 3)]  # the second continues after the first
    [1, 3]

    Source: keras.callbacks.BackupAndRestore.
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: int | str | bool = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
    ) -> None:
        if not os.fspath(backup_dir):
            raise InvalidArgumentError("backup_dir must be a directory, got ''. Name one.")
        is_number = type(save_freq) is int and save_freq >= 1
        if not (is_number or save_freq == "epoch" or save_freq is False):
            raise InvalidArgumentError(
                f'save_freq must be "epoch", a number of batches >= 1, or False, got {save_freq!r:.80}.'
            )
        self._directory = backup_dir
        self._every = save_freq if type(save_freq) is int else None
        self._each_epoch = save_freq == "epoch"
        self._keeps_two = double_checkpoint
        self._deletes = delete_checkpoint

    def _manager(self, checkpoint: Checkpoint, batches: Callable[[], int]) -> CheckpointManager:
        """Return the manager that saves and restores a `fit`; `batches` returns the number of finished batches."""
        return CheckpointManager(
            checkpoint,
            self._directory,
            max_to_keep=2 if self._keeps_two else 1,
            step_counter=batches,
            checkpoint_interval=self._every,
        )
