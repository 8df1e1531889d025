"""Checkpoints of a `fit`: the progress that they contain, and when they are saved and restored."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

from raydist.checkpoints.checkpoint import Checkpoint, contents_of
from raydist.checkpoints.listing import find_checkpoints
from raydist.checkpoints.manager import CheckpointManager
from raydist.checkpoints.run_directory import remove_checkpoint
from raydist.checkpoints.saves import SaveHandle
from raydist.core.errors import InvalidArgumentError
from raydist.distributed_dataset import DistributedDataset
from raydist.pipelines.stored.directory_files import directory_files
from raydist.training.callbacks.callback import Callback, FitSaver
from raydist.training.callbacks.checkpoint_callbacks import BackupAndRestore
from raydist.training.settings import Trainee

_NAME = "ckpt"  # prefix of checkpoint names of a manager without another name
_MAX_TO_KEEP = 3
_GROUP = "fit"
_VERSION = 1


@final
class FitState:
    """The progress of one `fit`, with the states of its callbacks and the position in its validation data.

    An object of a checkpoint; model and counters are separate objects.

    Attributes:
        epoch: Number of the current or next epoch, counted from 0.
        batches: Batches done in that epoch.
        drawn: Batches done in all epochs.
        first_step: Global step before the first batch.
        total: Batches of an epoch, if known.
        saw_data: True once there was any batch.
        logs: Logs of the epoch's training once that has ended and the validation is running; otherwise None.
        last_logs: Logs of the last completed epoch.
        stop: True if training stops after this execution, or has stopped.
    """

    def __init__(self, callbacks: Sequence[Callback] = (), held_out: DistributedDataset | None = None) -> None:
        self._callbacks = tuple(callbacks)
        self._held_out = held_out
        self._before_validation: Mapping[str, Any] | None = None
        self._with_callbacks = True
        self._has_warned = False
        self.epoch = 0
        self.batches = 0
        self.drawn = 0
        self.first_step = 0
        self.total: int | None = None
        self.saw_data = False
        self.logs: dict[str, Any] | None = None
        self.last_logs: dict[str, Any] = {}
        self.stop = False
        self._count_steps: Callable[[], object] = lambda: None  # brings the variable of the global step up to date

    @property
    def global_step(self) -> int:
        """The global step after the batches done. Counted here: reading the variable waits for the replicas."""
        return self.first_step + self.drawn

    @property
    def is_within_epoch(self) -> bool:
        """True if an epoch has begun and not ended."""
        return self.batches > 0 or self.logs is not None

    @contextlib.contextmanager
    def without_callbacks(self) -> Iterator[None]:
        """Leave callbacks out for the `with` block: before `on_train_begin` their counters may not exist."""
        self._with_callbacks = False
        try:
            yield
        finally:
            self._with_callbacks = True

    def end_training(self, logs: dict[str, Any]) -> None:
        """Record the end of the epoch's training, before its validation."""
        self.logs = dict(logs)
        self._before_validation = None if self._held_out is None else self._held_out.state_dict()

    def end_epoch(self, logs: dict[str, Any]) -> None:
        """Record the end of the epoch."""
        self.epoch, self.batches, self.logs, self.last_logs = self.epoch + 1, 0, None, dict(logs)
        self._before_validation = None

    def state_dict(self) -> dict[str, Any]:
        """Return the progress, with the states of the callbacks."""
        self._count_steps()
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "batches": self.batches,
            "drawn": self.drawn,
            "first_step": self.first_step,
            "total": self.total,
            "saw_data": self.saw_data,
            "logs": self.logs,
            "last_logs": self.last_logs,
            "stop": self.stop,
            "callbacks": [[type(one).__name__, one.state_dict()] for one in self._active_callbacks()],
            "held_out": self._held_out_state(),
        }

    def _active_callbacks(self) -> Sequence[Callback]:
        return self._callbacks if self._with_callbacks else ()

    def _held_out_state(self) -> Mapping[str, Any] | None:
        """Return the position of the validation data outside of validations: an interrupted validation is repeated."""
        if self._held_out is None or self._before_validation is not None:
            return self._before_validation
        return self._held_out.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the progress. Callbacks take saved states by class name, in order."""
        if state.get("version") != _VERSION:
            raise InvalidArgumentError(
                f"The state of a fit must be of version {_VERSION}, got {state.get('version')!r:.80}. Resume with the "
                "version of raydist that saved it."
            )
        self.epoch, self.batches, self.drawn = state["epoch"], state["batches"], state["drawn"]
        self.first_step = state.get("first_step", 0)  # earlier versions did not save it
        self.total, self.saw_data, self.stop = state["total"], state["saw_data"], state["stop"]
        self.logs = None if state["logs"] is None else dict(state["logs"])
        self.last_logs = dict(state["last_logs"])
        if self._held_out is not None and state["held_out"] is not None:
            self._held_out.load_state_dict(dict(state["held_out"]))
        self._before_validation = None
        self._load_callbacks(state["callbacks"])

    def _load_callbacks(self, saved: Sequence[Sequence[Any]]) -> None:
        unused, without_state = list(saved), []
        for callback in self._active_callbacks():
            found = next((one for one in unused if one[0] == type(callback).__name__), None)
            if found is not None:
                unused.remove(found)
                callback.load_state_dict(found[1])
            elif callback.state_dict():
                without_state.append(type(callback).__name__)
        lost = [name for name, state in unused if state]
        if lost and without_state and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"fit goes on without the saved states of the callbacks {', '.join(lost)}, and "
                f"{', '.join(without_state)} begin anew: a state is given to the class of that name. Was one renamed?",
                stacklevel=2,
            )


@final
class FitManager:
    """A checkpoint manager of a `fit`, and the settings when to use it.

    Args:
        manager: The manager. Its checkpoint has the whole state of the `fit`.
        resume: Resume from the newest checkpoint.
        fallback: Resume from the previous checkpoint if the newest is damaged.
        within_epochs: Call the manager after every execution.
        each_epoch: Save after every epoch.
        delete: Remove the checkpoints once training has ended normally.
        saved: Called with the handle of each save.

    Attributes:
        manager: The manager.
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
        saved: Callable[[SaveHandle | None], None] = lambda handle: None,
    ) -> None:
        self.manager = manager
        self._saved = saved
        self._resume = resume
        self._fallback = fallback
        self._within_epochs = within_epochs
        self._each_epoch = each_epoch
        self._delete = delete
        self._restored: str | None = None

    def restore(self) -> str | None:
        """Restore the newest checkpoint; return its path, or None if there is none. May be called again."""
        if self._restored is not None:
            self.manager.checkpoint.restore(self._restored)
            return self._restored
        self.manager.watch()
        if self._resume:
            self.manager.sync()  # a checkpoint being written is the newest, and may replace others
            self._restored = self.manager.restore_or_initialize(self._fallback)
        else:
            self.manager._count_from_here()
        return self._restored

    def after_execution(self) -> None:
        """Save if due, after an execution and all callbacks."""
        if self._within_epochs:
            self._saved(self.manager.save())

    def after_epoch(self, logs: dict[str, Any]) -> None:
        """Save if due, after an epoch and all callbacks."""
        if self._each_epoch:
            self._saved(self.manager.save(check_interval=False, metrics=self._metrics(logs)))

    def _metrics(self, logs: Mapping[str, Any]) -> dict[str, float] | None:
        """Return the numeric logs; None if the best is chosen by a validation that this epoch did not have."""
        best = self.manager.best_metric
        validated = any(name.startswith("val_") for name in logs)
        if best is not None and best.startswith("val_") and not validated:
            return None
        return {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}

    def finish(self) -> None:
        """Clean up after training has ended normally and callbacks were called."""
        if not self._delete:
            return
        self.manager.close()
        files = directory_files(self.manager.directory)
        for each in find_checkpoints(files, _NAME):  # other files in the directory stay
            remove_checkpoint(files.inside(each.kept.name))
        if not files.names() and not files.folders():
            with contextlib.suppress(OSError):  # hidden files are not listed
                files.remove_directory()


@final
class FitCheckpoints:
    """All checkpoint managers of one `fit`. The first one that finds a checkpoint restores it."""

    def __init__(self, managers: Sequence[FitSaver], state: FitState) -> None:
        self._managers = managers
        self._state = state
        self._source: FitSaver | None = None

    def restore(self) -> bool:
        """Restore the newest checkpoint; return True if there was one."""
        self._source = next((each for each in self._managers if each.restore() is not None), None)
        return self._source is not None

    def restore_again(self) -> None:
        """Undo changes by hooks that an uninterrupted `fit` would not have called here."""
        if self._source is not None:
            self._source.restore()

    def before_draw(self, data: DistributedDataset) -> contextlib.AbstractContextManager[None]:
        """Count the next step's batch as not drawn during the `with` block, because a hook may save before the step."""
        return data._epochs.before_draw() if self._managers else contextlib.nullcontext()

    def after_execution(self) -> None:
        """Let all managers save after an execution."""
        for each in self._managers:
            each.after_execution()

    def after_epoch(self, logs: dict[str, Any]) -> None:
        """Let all managers save after an epoch."""
        for each in self._managers:
            each.after_epoch(logs)

    def finish(self) -> None:
        """Let all managers clean up after a normal end."""
        for each in self._managers:
            each.finish()

    def warn_nothing_is_left(self, epochs: int) -> None:
        """Warn that the checkpoint is of a training that has ended."""
        why = "was stopped then" if self._state.stop else f"ends there (epochs={epochs})"
        warnings.warn(
            f"fit has nothing to train: its checkpoint is that of the end of epoch {self._state.epoch}, and training "
            f"{why}. Give a larger number of epochs, another directory, or resume=False.",
            stacklevel=2,
        )


def open_checkpoints(
    checkpoint: Any,
    callbacks: Sequence[Callback],
    trainee: Trainee,
    objects: Mapping[str, Any],
    data: DistributedDataset,
    state: FitState,
    *,
    resume: bool,
    stack: contextlib.ExitStack,
) -> FitCheckpoints:
    """Return the managers for the arguments of `fit`, one for each `BackupAndRestore` included; `stack` closes them.

    `checkpoint` is a directory, an `rd.CheckpointManager`, or None; `objects` are the model's own, by name.
    """
    trackers, accumulation = trainee.compiled.trackers, trainee.compiled.update.accumulation
    counter = trainee.strategy._make_counter()
    group = {
        "state": state,
        "data": data,
        "global_step": counter,
        "loss": trackers.loss,
        "rows": trackers.rows,
        "metrics": dict(trackers.metrics),
        **({} if accumulation is None else {"accumulation": accumulation}),
    }

    def new_checkpoint() -> Checkpoint:
        return Checkpoint(gradients=accumulation is not None, **objects, **{_GROUP: group})

    managers: list[FitSaver] = []
    if isinstance(checkpoint, CheckpointManager):
        stack.enter_context(_adding(checkpoint, objects, group, needs_gradients=accumulation is not None))
        within = checkpoint.checkpoint_interval is not None or checkpoint.interval_s is not None
        managers.append(FitManager(checkpoint, resume=resume, within_epochs=within))
    elif isinstance(checkpoint, str | os.PathLike):
        manager = stack.enter_context(CheckpointManager(new_checkpoint(), checkpoint, _MAX_TO_KEEP))
        managers.append(FitManager(manager, resume=resume))
    elif checkpoint is not None:
        raise InvalidArgumentError(
            f"checkpoint must be a directory or an rd.CheckpointManager, got {checkpoint!r:.80}. Give an "
            "rd.Checkpoint to a manager: rd.CheckpointManager(checkpoint, directory, max_to_keep=3)."
        )
    for backup in (each for each in callbacks if isinstance(each, BackupAndRestore)):
        manager = stack.enter_context(backup._manager(new_checkpoint(), lambda: state.drawn))
        managers.append(
            FitManager(
                manager,
                fallback=backup._keeps_two,
                within_epochs=backup._every is not None,
                each_epoch=backup._each_epoch,
                delete=backup._deletes,
            )
        )
    savers = [saver for each in callbacks if (saver := each._saver(new_checkpoint, state)) is not None]
    for saver in savers:
        if isinstance(saver, FitManager):
            stack.enter_context(saver.manager)
    state.first_step = int(counter.value) if savers else 0
    state._count_steps = trainee.strategy._make_counter
    managers += savers
    return FitCheckpoints(managers, state)


def _adding(
    manager: CheckpointManager, objects: Mapping[str, Any], group: Mapping[str, Any], *, needs_gradients: bool
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the user's manager also saves the state of the `fit`, and what it lacks of the model.

    Raises:
        InvalidArgumentError: The checkpoint must hold gradients, and does not.
    """
    contents = contents_of(manager.checkpoint)
    if needs_gradients and not contents.has_gradients:
        raise InvalidArgumentError(
            "A checkpoint of a fit with accumulate_steps must hold pending gradients, got one without. Make it by "
            "rd.Checkpoint(..., gradients=True)."
        )
    saved_already = {id(obj) for obj in contents.own_objects().values()}
    missing = {name: obj for name, obj in objects.items() if id(obj) not in saved_already}
    return contents.during_fit({_GROUP: {**group, **missing}})
