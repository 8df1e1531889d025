"""Checkpoints of a running `fit`, to resume after an interruption."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import final

from raydist.checkpoints.checkpoint import Checkpoint
from raydist.checkpoints.manager import CheckpointManager
from raydist.errors import InvalidArgumentError
from raydist.training.callbacks.callback import Callback

__all__ = ["BackupAndRestore"]


@final
class BackupAndRestore(Callback):
    """A callback that resumes an interrupted `fit` from its last save.

    Run the program again: `fit` restores weights, optimizer, metrics, callbacks, history and the position in the data,
    and continues with the batch after the last save. Saves run after all callbacks, independent of this callback's
    position in the list. `fit(checkpoint=...)` does the same and keeps the checkpoints.

    Args:
        backup_dir: Directory for the saves: a path, or a URI that fsspec supports. Must not be used for anything else.
        save_freq: "epoch": save after every epoch. A number: save after so many batches. False: save only on preemption
            (see :class:`CheckpointManager`), which the other settings save for as well.
        double_checkpoint: Also keep the previous checkpoint, and resume from it if the last one is damaged.
        delete_checkpoint: Remove the saves once training has ended normally.

    Attributes:
        each_epoch: True if the callback saves after every epoch.
        keeps_two: True if the previous checkpoint is kept, too.
        deletes: True if the saves are removed at the end.

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
    >>> [len(train(epochs).epoch) for epochs in (1, 3)]  # the second goes on where the first was
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
        self.each_epoch = save_freq == "epoch"
        self.keeps_two = double_checkpoint
        self.deletes = delete_checkpoint

    @property
    def within_epochs(self) -> bool:
        """True if the callback saves after a number of batches.

        >>> rd.BackupAndRestore("backup", save_freq=100).within_epochs
        True

        Source: raydist's own.
        """
        return self._every is not None

    def manager(self, checkpoint: Checkpoint, batches: Callable[[], int]) -> CheckpointManager:
        """Return the manager that saves and restores. Called by `fit`.

        Args:
            checkpoint: Checkpoint of the `fit`.
            batches: Returns the number of batches done.

        Returns:
            A manager that has not started yet.

        Source: raydist's own.

        >>> rd.BackupAndRestore("backup").manager(rd.Checkpoint(progress=rd.State()), lambda: 0).directory
        'backup'
        """
        return CheckpointManager(
            checkpoint,
            self._directory,
            max_to_keep=2 if self.keeps_two else 1,
            step_counter=batches,
            checkpoint_interval=self._every,
        )
