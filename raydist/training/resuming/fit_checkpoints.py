"""Checkpoints of a `fit`: their contents, and the keepers that save them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from raydist.checkpoints.checkpoint import Checkpoint, contents_of
from raydist.checkpoints.manager import CheckpointManager
from raydist.checkpoints.removal import remove_checkpoint
from raydist.checkpoints.saved_ones import find_checkpoints
from raydist.errors import InvalidArgumentError
from raydist.pipelines.stored.directory_files import directory_files
from raydist.strategies.global_step import counter_of
from raydist.training.callbacks.backup_and_restore import BackupAndRestore
from raydist.training.resuming.fit_state import FitState
from raydist.training.resuming.keeping import Keeper, Keepers
from raydist.training.steps import Trainee

if TYPE_CHECKING:
    from raydist.distributed_dataset import DistributedDataset
    from raydist.training.callbacks.callback import Callback

__all__ = ["FitCheckpoints", "ManagedKeeper"]

_NAME = "ckpt"  # prefix of checkpoint names of a manager without another name


@final
class ManagedKeeper(Keeper):
    """A keeper that saves and restores by a manager, whose checkpoint has the whole state of the `fit`.

    Args:
        manager: The manager.
        resume: Resume from the newest checkpoint of the manager.
        fallback: Resume from the previous checkpoint if the newest is damaged.
        within_epochs: Call the manager after every execution.
        each_epoch: Save after every epoch.
        delete: Remove the manager's checkpoints once training has ended normally.
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
            self._manager.sync()  # a checkpoint being written is the newest, and may replace others
            self._restored = self._manager.restore_or_initialize(self._fallback)
        return self._restored

    def after_execution(self, num_batches: int) -> None:
        if self._within_epochs:
            self._manager.save()

    def after_epoch(self, logs: dict[str, Any]) -> None:
        if self._each_epoch:
            self._manager.save(check_interval=False, metrics=self._metrics(logs))

    def _metrics(self, logs: Mapping[str, Any]) -> dict[str, float] | None:
        """Return the numeric logs; None if the best is chosen by a validation that this epoch did not have."""
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
        for each in find_checkpoints(files, _NAME):  # other files in the directory stay
            remove_checkpoint(files.inside(each.kept.name))
        if not files.names() and not files.folders():
            with contextlib.suppress(OSError):  # hidden files are not listed
                files.remove_directory()


_MAX_TO_KEEP = 3
_GROUP = "fit"


@final
@dataclass(frozen=True, slots=True)
class FitCheckpoints:
    """The state of a `fit`, for the creation of its keepers.

    Attributes:
        trainee: The model in training.
        objects: The model's own objects, by name.
        data: The training data.
        state: Progress of the `fit`.
    """

    trainee: Trainee
    objects: Mapping[str, Any]
    data: DistributedDataset
    state: FitState

    def opened(
        self, checkpoint: Any, callbacks: Sequence[Callback], resume: bool, stack: contextlib.ExitStack
    ) -> Keepers:
        """Return the keepers for the arguments of `fit`; `stack` closes them.

        Args:
            checkpoint: A directory, an `rd.CheckpointManager`, or None.
            callbacks: Callbacks of `fit`; each `BackupAndRestore` adds a keeper.
            resume: Resume from the newest checkpoint of `checkpoint`.
            stack: Closes the managers.

        Raises:
            InvalidArgumentError: `checkpoint` has another type, or lacks gradients that must be saved.
        """
        keepers: list[Keeper] = []
        if isinstance(checkpoint, CheckpointManager):
            keepers.append(self._of_manager(checkpoint, resume, stack))
        elif checkpoint is not None:
            if not isinstance(checkpoint, str | os.PathLike):
                raise InvalidArgumentError(
                    f"checkpoint must be a directory or an rd.CheckpointManager, got {checkpoint!r:.80}. Give an "
                    "rd.Checkpoint to a manager: rd.CheckpointManager(checkpoint, directory, max_to_keep=3)."
                )
            manager = stack.enter_context(CheckpointManager(self._whole(), checkpoint, _MAX_TO_KEEP))
            keepers.append(ManagedKeeper(manager, resume=resume))
        keepers += [self._of_backup(each, stack) for each in callbacks if isinstance(each, BackupAndRestore)]
        return Keepers(keepers, self.state)

    def _of_manager(self, manager: CheckpointManager, resume: bool, stack: contextlib.ExitStack) -> Keeper:
        contents = contents_of(manager.checkpoint)
        if self.trainee.compiled.update.accumulation is not None and not contents.has_gradients:
            raise InvalidArgumentError(
                "A checkpoint of a fit with accumulate_steps must hold pending gradients, got one without. Make it by "
                "rd.Checkpoint(..., gradients=True)."
            )
        known = {id(obj) for obj in contents.own().values()}
        missing = {name: obj for name, obj in self.objects.items() if id(obj) not in known}
        stack.enter_context(contents.holding({_GROUP: {**self._group(), **missing}}))
        within = manager.checkpoint_interval is not None or manager.interval_s is not None
        return ManagedKeeper(manager, resume=resume, within_epochs=within)

    def _of_backup(self, backup: BackupAndRestore, stack: contextlib.ExitStack) -> Keeper:
        manager = stack.enter_context(backup.manager(self._whole(), lambda: self.state.drawn))
        return ManagedKeeper(
            manager,
            fallback=backup.keeps_two,
            within_epochs=backup.within_epochs,
            each_epoch=backup.each_epoch,
            delete=backup.deletes,
        )

    def _whole(self) -> Checkpoint:
        gradients = self.trainee.compiled.update.accumulation is not None
        return Checkpoint(gradients=gradients, **self.objects, **{_GROUP: self._group()})

    def _group(self) -> dict[str, Any]:
        compiled = self.trainee.compiled
        trackers, accumulation = compiled.trackers, compiled.update.accumulation
        return {
            "state": self.state,
            "data": self.data,
            "global_step": counter_of(self.trainee.strategy),
            "loss": trackers.loss,
            "rows": trackers.rows,
            "metrics": dict(trackers.metrics),
            **({} if accumulation is None else {"accumulation": accumulation}),
        }
