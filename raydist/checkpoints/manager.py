"""`rd.CheckpointManager`: when to save, what to keep, what to restore, and leaving in time."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, final

from raydist.checkpoints.background import SaveHandle
from raydist.checkpoints.checkpoint import Checkpoint, contents_of
from raydist.checkpoints.loops.manager_here import ManagerHere, may_be_lent
from raydist.checkpoints.managing.saves import ManagedSaves
from raydist.checkpoints.managing.watch import ManagerWatch
from raydist.checkpoints.retention import Best, Retention, seconds_of
from raydist.checkpoints.run_directory import RunDirectory
from raydist.checkpoints.save_interval import SaveInterval
from raydist.checkpoints.saved_ones import FoundCheckpoint
from raydist.context.current import has_strategy, in_cross_replica_context
from raydist.context.replica_context import loop_here
from raydist.errors import DataLossError, FailedPreconditionError, InvalidArgumentError
from raydist.owning_process import OwningProcess
from raydist.pipelines.formats.files import path_text
from raydist.pipelines.stored.file_directory import is_file_name
from raydist.preemption.boundaries import end_reason, leave, leave_at_last, unwatch_steps, watch_steps

__all__ = ["CheckpointManager", "KeptCheckpoints", "require_arguments"]


class KeptCheckpoints:
    """The checkpoints of one run: which there are, and how much lies between two."""

    def __init__(self, run: RunDirectory, interval: SaveInterval) -> None:
        self._run, self._interval = run, interval

    @property
    def directory(self) -> str:
        """Where it saves.

        Source: tf.train.CheckpointManager.directory.
        """
        return self._run.path

    @property
    def checkpoint_interval(self) -> int | None:
        """Steps between two saves.

        Source: tf.train.CheckpointManager.checkpoint_interval.
        """
        return self._interval.steps

    @property
    def interval_s(self) -> float | None:
        """Seconds between two saves.

        Source: raydist's own.
        """
        return self._interval.seconds

    @property
    def best_metric(self) -> str | None:
        """The metric that says which checkpoint is best; None where nobody asked for one.

        Source: raydist's own.
        """
        best = self._run.retention.best
        return None if best is None else best.metric

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the newest checkpoints, at most `max_to_keep`, oldest first. Reads the directory.

        Those that stay for good or as the best are listed while they are among the newest only.

        Source: tf.train.CheckpointManager.checkpoints.
        """
        return self._run.newest()

    @property
    def latest_checkpoint(self) -> str | None:
        """Path of the newest checkpoint; None where there is none. Reads the directory.

        Source: tf.train.CheckpointManager.latest_checkpoint.
        """
        return next(reversed(self.checkpoints), None)

    @property
    def best_checkpoint(self) -> str | None:
        """Path of the checkpoint with the best value of the metric of `best`; None where there is none.

        Source: raydist's own; `best` of Orbax's CheckpointManager.
        """
        return self._run.best()


_LARGEST_NUMBER = (1 << 63) - 1  # of a checkpoint: 19 digits behind its name


def require_arguments(checkpoint: Any, checkpoint_name: Any, init_fn: Any, exit_code: Any) -> None:
    """InvalidArgumentError unless `CheckpointManager` can be meant so."""
    if not isinstance(checkpoint, Checkpoint):
        raise InvalidArgumentError(f"checkpoint must be an rd.Checkpoint, got {type(checkpoint).__name__}.")
    if not is_file_name(f"{checkpoint_name}-{_LARGEST_NUMBER}"):
        raise InvalidArgumentError(
            f"checkpoint_name must consist of letters, digits, '.', '_' and '-', at most 180 of them, got "
            f"{checkpoint_name!r:.100}."
        )
    if not (init_fn is None or callable(init_fn)):
        raise InvalidArgumentError(f"init_fn must be a function without arguments, or None, got {init_fn!r:.80}.")
    if not (type(exit_code) is int and 0 <= exit_code <= 255):
        raise InvalidArgumentError(f"exit_code must be a number from 0 to 255, got {exit_code!r:.50}.")


@final
class CheckpointManager(KeptCheckpoints):
    """Saves a checkpoint every so often, keeps the newest ones and the best one, and restores the newest.

    From `restore_or_initialize` or the first `save` on until `close` it is the only one that may write into the
    directory, and watches for the end of the process: on SIGTERM, or when the node of the driver or of a replica is
    drained, it saves at the next boundary between two steps, and `run` raises :class:`Preempted`. What was drawn from
    a distributed dataset of the checkpoint for that step counts as not drawn. Handlers of SIGTERM that were there are
    run after that, but for Ray's, and put back by `close`. A second SIGTERM changes nothing. That save is tried
    whatever has failed before; if it fails, the process ends all the same, and says what the last checkpoint is. Use it
    in the main thread: in another one nodes are watched, and SIGTERM is not.

    Where the function of `run` is given a distributed iterator and draws batches itself, each of its draws is such a
    boundary: `save` may stand behind a draw (all replicas call it, it counts once), and when the process is to end the
    draw raises :class:`Preempted` once the checkpoint is whole. What only the driver has (an `rd.State`, say) is saved
    there as it was when `run` was called; where rules of one's own let replicas differ, the first one's part is. Under
    `rd.ParameterServerStrategy` what was scheduled and has not begun is given up then, and is drawn again after a
    restart; what has begun ends first, also where it draws batches itself.

    Args:
        checkpoint: What to save.
        directory: Where to: a path, or a URI that fsspec knows. Each checkpoint is a directory in it, `ckpt-<number>`.
            Replicas write there, too: those of other machines must see it under the same name.
        max_to_keep: How many of the newest stay; None for all.
        keep_checkpoint_every_n_hours: Beside these, one for each so many hours stays for good.
        checkpoint_name: What checkpoints are called before the number.
        step_counter: What counts the steps: something with `item()` (a tensor), or a function. None counts the calls of
            `save`; that count is kept in the checkpoint. Its value is the number of a checkpoint.
        checkpoint_interval: Steps between two saves; without it each call saves.
        init_fn: Called by `restore_or_initialize` where there is nothing to restore.
        interval_s: Seconds between two saves; with `checkpoint_interval`, whichever is over first.
        best: A metric and "min" or "max": the checkpoint where it is best stays as well.
        asynchronous: Whether `save` copies the state and writes it in a thread. One write at a time: the next `save`
            waits for the one before. The memory of the copy is kept for the next one.
        exit_code: Of the process that ends by :class:`Preempted`.

    Raises:
        InvalidArgumentError: An argument is out of its range.

    >>> import tempfile
    >>> progress = rd.State(epoch=0)
    >>> manager = rd.CheckpointManager(rd.Checkpoint(progress=progress), tempfile.mkdtemp(), max_to_keep=2)
    >>> manager.restore_or_initialize()
    >>> for progress.epoch in range(3):
    ...     handle = manager.save()
    >>> manager.close()
    >>> [path.rpartition("/")[2] for path in manager.checkpoints]
    ['ckpt-2', 'ckpt-3']

    Source: tf.train.CheckpointManager; preemption as tf.distribute.experimental.PreemptionCheckpointHandler.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Any = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], object] | None = None,
        *,
        interval_s: float | None = None,
        best: tuple[str, str] | None = None,
        asynchronous: bool = True,
        exit_code: int = 42,
    ) -> None:
        require_arguments(checkpoint, checkpoint_name, init_fn, exit_code)
        seconds = seconds_of(keep_checkpoint_every_n_hours)
        retention = Retention(max_to_keep, seconds, Best.parse(best))
        run = RunDirectory(path_text(directory), checkpoint_name, retention)
        super().__init__(run, SaveInterval(checkpoint_interval, interval_s))
        self._saves = ManagedSaves(contents_of(checkpoint), run, self._interval, step_counter)
        self._watch = ManagerWatch(self._saves, exit_code, asynchronous=asynchronous)
        self._checkpoint = checkpoint
        self._init_fn, self._asynchronous = init_fn, asynchronous
        self._process = OwningProcess("A CheckpointManager")
        self._closed = False

    @property
    def checkpoint(self) -> Checkpoint:
        """What it saves.

        Source: tf.train.CheckpointManager.checkpoint.
        """
        return self._checkpoint

    def restore_or_initialize(self, fallback: bool = False) -> str | None:
        """Restore the newest checkpoint, if there is one; else call `init_fn`.

        Args:
            fallback: Where it is damaged, warn and restore the one before.

        Returns:
            The path of what was restored; None without.

        Raises:
            DataLossError: It is damaged; names the file and the tensor.
            InvalidArgumentError: It does not fit; see `Checkpoint.restore`.
            FailedPreconditionError: Another process writes into the directory: says which, and since when. Or nothing
                may be written there.

        Source: tf.train.CheckpointManager.restore_or_initialize.
        """
        self._start()
        found = self._run.find()
        while found:
            each = found.pop()
            try:
                self._restore(each)
            except DataLossError as error:
                if not fallback:
                    raise
                warnings.warn(f"{error} The checkpoint before it is tried.", RuntimeWarning, stacklevel=2)
            else:
                return self._run.path_of(each.kept)
        if self._init_fn is not None:
            self._init_fn()
        self._saves.begin_anew()
        return None

    def _restore(self, found: FoundCheckpoint) -> None:
        if found.damage is not None:
            raise found.damage
        contents_of(self._checkpoint).restore(self._run.files_of(found.kept))  # its path may be a relative one
        self._saves.go_on_from(found)
        self._watch.look()

    def watch(self) -> None:
        """Begin to watch for the end of the process, as `restore_or_initialize` and the first `save` do. Saves nothing.

        Raises:
            FailedPreconditionError: Another process writes into the directory: says which, and since when.

        Source: raydist's own.

        >>> import tempfile
        >>> with rd.CheckpointManager(rd.Checkpoint(progress=rd.State()), tempfile.mkdtemp(), 1) as manager:
        ...     manager.watch()
        """
        self._start()
        self._watch.look()

    def _start(self) -> None:
        """Become the only writer and watch for the end of the process; where that is so already, look at SIGTERM."""
        self._require_usable()
        if not self._run.is_ours:
            self._run.take()
            self._watch.look()
            weakref.finalize(self, unwatch_steps).atexit = False
        watch_steps(self._watch)

    def _require_usable(self) -> None:
        self._process.require("used")
        if self._closed:
            raise FailedPreconditionError("This CheckpointManager is closed and saves nothing more. Make a new one.")
        if has_strategy() and not in_cross_replica_context() and loop_here() is None:
            raise FailedPreconditionError(
                "A checkpoint must be saved by the driver, but this code runs inside of strategy.run. Call save() "
                "between two runs, or after a draw from a distributed iterator that was passed to run."
            )

    def save(
        self,
        checkpoint_number: int | None = None,
        check_interval: bool = True,
        metrics: Mapping[str, Any] | None = None,
    ) -> SaveHandle | None:
        """Save a checkpoint, if one is due. The state is that of this call, in the order of dispatched steps.

        Waits until the state is copied, and until the write before has ended; with `asynchronous=False` until it is
        written. A failure to write warns, with the next call; the third in a row is raised.

        Args:
            checkpoint_number: In the name; None for the step counter's.
            check_interval: Whether to save only where one is due; else now.
            metrics: Numbers that are kept with it, the one of `best` among them.

        Returns:
            What tells when it is whole; None where none was due.

        Raises:
            Preempted: The process is to end; everything was saved.
            InvalidArgumentError: A state cannot be saved, or `metrics` lacks the metric of `best`.
            FailedPreconditionError: Another process writes into the directory, this manager is closed, or this is a
                step.
            Exception: What a dispatched step raised; nothing is saved then.

        Source: tf.train.CheckpointManager.save.
        """
        self._start()
        saves = self._saves
        self._watch.settle()
        saves.calls += 1
        if end_reason() is not None and loop_here() is None:  # a loop leaves where it draws
            leave(before_draw=False)
        saves.writer.tell()
        step = saves.step()
        if check_interval and not saves.is_due(step):
            return None
        number = step if checkpoint_number is None else checkpoint_number
        return saves.save(number, metrics, here=not self._asynchronous)

    def sync(self) -> None:
        """Wait until the checkpoint that is being written is whole. Warns and raises as `save` does.

        Source: tf.train.CheckpointManager.sync.
        """
        self._process.require("used")
        self._watch.settle()
        self._saves.writer.wait()

    def close(self) -> None:
        """Wait for the last write, let others write into the directory, and leave SIGTERM as it was. May be repeated.

        Raises:
            Preempted: The process is to end, and no step has come since it was told so; everything was saved.
            Exception: Why the last save has failed, if nobody was told by an exception.

        Source: raydist's own.
        """
        if self._closed or not self._process.is_this:
            return
        try:
            self._end()
        finally:
            self._closed = True
            unwatch_steps(self._watch)
            self._run.give_back()

    def _end(self) -> None:
        try:
            self._watch.settle()
            self._saves.writer.join()  # what comes meanwhile counts
            if self._run.is_ours and sys.exception() is None:  # else that is what the program ends by
                leave_at_last()
        finally:
            self._saves.writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(Exception) if kind is not None else contextlib.nullcontext():
            self.close()

    def __reduce__(self) -> Any:
        if may_be_lent():
            return ManagerHere, (self._watch.key,)
        raise FailedPreconditionError(
            "A CheckpointManager must stay in the process that made it, but it was to be pickled. Call save() between "
            "two runs, not in a step."
        )
