"""Checkpoints of a `fit` that is interrupted, for as long as it runs."""

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
    """A `fit` that was interrupted goes on where it was last saved. A callback.

    Run the program again: weights, optimizer, metrics, callbacks, history and the place in the data are restored, and
    the next batch is the one after the last that was saved. Saves come after all callbacks, wherever this one stands
    in their list. `fit(checkpoint=...)` does the same and keeps the checkpoints.

    Args:
        backup_dir: Where to save: a path, or a URI that fsspec knows; a directory of its own.
        save_freq: "epoch": after every epoch. A number: after so many batches. False: only when the process is to end
            (see :class:`CheckpointManager`), which the others save for as well.
        double_checkpoint: Keep the checkpoint before the last, too, and go on from it where the last is damaged.
        delete_checkpoint: Remove what was saved once training has ended in order.

    Attributes:
        each_epoch: Whether it saves after every epoch.
        keeps_two: Whether the checkpoint before the last stays, too.
        deletes: Whether what was saved is removed in the end.

    Raises:
        InvalidArgumentError: `backup_dir` is empty, or `save_freq` something else.
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
        """Whether it saves after a number of batches.

        >>> rd.BackupAndRestore("backup", save_freq=100).within_epochs
        True

        Source: raydist's own.
        """
        return self._every is not None

    def manager(self, checkpoint: Checkpoint, batches: Callable[[], int]) -> CheckpointManager:
        """What saves and restores. Called by `fit`.

        Args:
            checkpoint: What belongs to the `fit`.
            batches: Tells how many batches are done.

        Returns:
            A manager that has not begun yet.

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
