"""A `fit` whose checkpoints an `rd.CheckpointManager` keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, final

from raydist.checkpoints.manager import CheckpointManager
from raydist.checkpoints.removal import remove_checkpoint
from raydist.checkpoints.saved_ones import find_checkpoints
from raydist.pipelines.stored.directory_files import directory_files
from raydist.training.resuming.keeping import Keeper

__all__ = ["ManagedKeeper"]

_NAME = "ckpt"  # before the numbers of checkpoints, where a manager was given no other


@final
class ManagedKeeper(Keeper):
    """Saves and restores by a manager, whose checkpoint holds all that belongs to the `fit`.

    Args:
        manager: It.
        resume: Whether to go on from its newest checkpoint.
        fallback: Whether to go on from the one before where that is damaged.
        within_epochs: Whether to ask the manager after every execution.
        each_epoch: Whether to save after every epoch.
        delete: Whether its checkpoints are removed once training has ended in order.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        *,
        resume: bool = True,
        fallback: bool = False,
        within_epochs: bool = False,
        each_epoch: bool = True,
        delete: bool = False,
    ) -> None:
        self._manager = manager
        self._resume = resume
        self._fallback = fallback
        self._within_epochs = within_epochs
        self._each_epoch = each_epoch
        self._delete = delete
        self._restored: str | None = None

    def restore(self) -> str | None:
        if self._restored is not None:
            self._manager.checkpoint.restore(self._restored)
            return self._restored
        self._manager.watch()
        if self._resume:
            self._manager.sync()  # what is still written is the newest, and then takes the place of others
            self._restored = self._manager.restore_or_initialize(self._fallback)
        return self._restored

    def after_execution(self, num_batches: int) -> None:
        if self._within_epochs:
            self._manager.save()

    def after_epoch(self, logs: dict[str, Any]) -> None:
        if self._each_epoch:
            self._manager.save(check_interval=False, metrics=self._metrics(logs))

    def _metrics(self, logs: Mapping[str, Any]) -> dict[str, float] | None:
        """What is a number; nothing where the best is told by a validation that this epoch did not have."""
        best = self._manager.best_metric
        validated = any(name.startswith("val_") for name in logs)
        if best is not None and best.startswith("val_") and not validated:
            return None
        return {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}

    def finish(self) -> None:
        if not self._delete:
            return
        self._manager.close()
        files = directory_files(self._manager.directory)
        for each in find_checkpoints(files, _NAME):  # what others have saved there is theirs
            remove_checkpoint(files.inside(each.kept.name))
        if not files.names() and not files.folders():
            with contextlib.suppress(OSError):  # what is hidden is not listed
                files.remove_directory()
