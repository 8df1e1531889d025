"""`rd.CheckpointManager`: periodic saves, retention, restoring, and saving before preemption."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, final

from raydist.checkpoints.checkpoint import Checkpoint, contents_of
from raydist.checkpoints.listing import Best, FoundCheckpoint, Retention, SaveInterval, seconds_of
from raydist.checkpoints.replica_loop import ManagerProxy, may_send_managers
from raydist.checkpoints.run_directory import RunDirectory
from raydist.checkpoints.saves import ManagerSaves, SaveHandle
from raydist.checkpoints.watch import ManagerWatch
from raydist.cluster.preemption import end_after_last_step, end_if_preempted, end_reason, unwatch_steps, watch_steps
from raydist.context.current import has_strategy, in_cross_replica_context
from raydist.context.replica_context import loop_here
from raydist.core.errors import DataLossError, FailedPreconditionError, InvalidArgumentError
from raydist.core.fork_guard import OwningProcess
from raydist.pipelines.formats.files import path_text
from raydist.pipelines.stored.file_directory import is_file_name

_LARGEST_NUMBER = (1 << 63) - 1  # largest number of a checkpoint: 19 digits in its name


def require_arguments(checkpoint: Any, checkpoint_name: Any, init_fn: Any, exit_code: Any) -> None:
    """Raise InvalidArgumentError for an argument of `CheckpointManager` that is out of its range."""
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
class CheckpointManager:
    """A manager that saves checkpoints at intervals, keeps the newest and the best, and restores the newest.

    From `restore_or_initialize` or the first `save` until `close`, the manager is the only writer of the directory and
    watches for preemption: on SIGTERM, or when the node of the driver or of a replica is drained, the manager saves at
    the next step boundary, and `run` raises :class:`Preempted`. The program may have drawn a batch for the step that
    does not run. If the checkpoint contains the batch's distributed dataset, the restored dataset gives that batch
    again. After the save, the manager calls earlier SIGTERM handlers, except Ray's; `close` restores these handlers. A
    second SIGTERM has no effect. The manager tries this last save even if earlier saves failed. If the last save fails,
    the process still ends, with a message that names the newest checkpoint. Use the manager in the main thread: in
    other threads the manager watches nodes, but not SIGTERM.

    If the function of `run` takes a distributed iterator and draws batches itself, each draw is a step boundary. The
    function may call `save` after a draw: all replicas call `save`, and the calls make one checkpoint. On preemption
    the draw raises :class:`Preempted` once the checkpoint is complete. Objects that only the driver has (an `rd.State`,
    for example) are saved as they were when `run` was called. If custom strategy hooks let an object differ between
    replicas, the first replica's state is saved. On preemption under `rd.ParameterServerStrategy`, closures that have
    begun finish first, including those that draw batches themselves. Scheduled closures that have not begun are
    dropped, and their batches are drawn again after a restart.

    Args:
        checkpoint: The checkpoint to save.
        directory: Directory of the checkpoints: a path, or a URI that fsspec supports. Each checkpoint is a
            subdirectory, `ckpt-<number>`. Replicas write there, too: all machines must see it under the same path.
        max_to_keep: Number of newest checkpoints to keep; None for all.
        keep_checkpoint_every_n_hours: Also keep one checkpoint of each period of this length, and never delete it.
        checkpoint_name: Prefix of the checkpoints' names, before the number.
        step_counter: Counter of steps: an object with `item()` (a tensor), or a function. None counts the calls of
            `save` and stores that count in the checkpoint. The counter's value is the checkpoint's number.
        checkpoint_interval: Steps between two saves; None to save in each call of `save`.
        init_fn: Called by `restore_or_initialize` if there is no checkpoint to restore.
        interval_s: Seconds between two saves; with `checkpoint_interval`, the interval that ends first counts.
        best: A metric and "min" or "max": the checkpoint with the best value is kept as well.
        asynchronous: Let `save` copy the state and write it in a thread. One write at a time: the next `save` waits
            for the previous write. The manager reuses the memory of the copy for the next save.
        exit_code: Exit code of a process that :class:`Preempted` ends.

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
        self._run = RunDirectory(path_text(directory), checkpoint_name, retention)
        self._interval = SaveInterval(checkpoint_interval, interval_s)
        self._saves = ManagerSaves(contents_of(checkpoint), self._run, self._interval, step_counter)
        self._watch = ManagerWatch(self._saves, exit_code, asynchronous=asynchronous)
        self._checkpoint = checkpoint
        self._init_fn, self._asynchronous = init_fn, asynchronous
        self._process = OwningProcess("A CheckpointManager")
        self._closed = False

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that the manager saves.

        Source: tf.train.CheckpointManager.checkpoint.
        """
        return self._checkpoint

    @property
    def directory(self) -> str:
        """The directory of the checkpoints, as given.

        Source: tf.train.CheckpointManager.directory.
        """
        return self._run.path

    @property
    def checkpoint_interval(self) -> int | None:
        """Steps between two saves; None if steps do not limit saves.

        Source: tf.train.CheckpointManager.checkpoint_interval.
        """
        return self._interval.steps

    @property
    def interval_s(self) -> float | None:
        """Seconds between two saves; None if time does not limit saves.

        Source: raydist's own.
        """
        return self._interval.seconds

    @property
    def best_metric(self) -> str | None:
        """The metric of `best`, which ranks checkpoints; None without `best`.

        Source: raydist's own.
        """
        best = self._run.retention.best
        return None if best is None else best.metric

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the newest checkpoints, at most `max_to_keep`, oldest first. Reads the directory.

        A checkpoint that is kept for its period, or as the best, is listed only while it is among the newest.

        Source: tf.train.CheckpointManager.checkpoints.
        """
        return self._run.newest()

    @property
    def latest_checkpoint(self) -> str | None:
        """Path of the newest checkpoint; None if there is none. Reads the directory.

        Source: tf.train.CheckpointManager.latest_checkpoint.
        """
        return next(reversed(self.checkpoints), None)

    @property
    def best_checkpoint(self) -> str | None:
        """Path of the checkpoint with the best value of the metric of `best`; None if there is none.

        Source: raydist's own; `best` of Orbax's CheckpointManager.
        """
        return self._run.best()

    def restore_or_initialize(self, fallback: bool = False) -> str | None:
        """Restore the newest checkpoint if there is one; otherwise call `init_fn`. Blocks.

        Args:
            fallback: If the newest checkpoint is damaged, warn and restore the previous one.

        Returns:
            Path of the restored checkpoint; None if there is none.

        Raises:
            DataLossError: The checkpoint is damaged; the message names the file and the tensor.
            InvalidArgumentError: The checkpoint does not fit; see `Checkpoint.restore`.
            FailedPreconditionError: Another process writes into the directory (the message says which, and since when),
                or the directory must not be written to.

        Source: tf.train.CheckpointManager.restore_or_initialize.
        """
        self._start()
        found = self._run.find()
        while found:
            candidate = found.pop()
            try:
                self._restore(candidate)
            except DataLossError as error:
                if not fallback:
                    raise
                warnings.warn(f"{error} Trying the previous checkpoint.", RuntimeWarning, stacklevel=2)
            else:
                return self._run.path_of(candidate.kept)
        if self._init_fn is not None:
            self._init_fn()
        self._saves.start_intervals()
        return None

    def _restore(self, found: FoundCheckpoint) -> None:
        if found.damage is not None:
            raise found.damage
        # pass the directory's files, because the path may be relative
        contents_of(self._checkpoint).restore(self._run.files_of(found.kept))
        self._saves.continue_from(found)
        self._watch.look()

    def watch(self) -> None:
        """Start to watch for preemption, as `restore_or_initialize` and the first `save` do. Saves nothing.

        Raises:
            FailedPreconditionError: Another process writes into the directory; the message says which, and since when.

        Source: raydist's own.

        >>> import tempfile
        >>> with rd.CheckpointManager(rd.Checkpoint(progress=rd.State()), tempfile.mkdtemp(), 1) as manager:
        ...     manager.watch()
        """
        self._start()
        self._watch.look()

    def _count_from_here(self) -> None:
        """Count intervals from the current step, as after a restore that has found nothing."""
        self._saves.start_intervals()

    def _start(self) -> None:
        """Acquire the directory, unless this manager has it, and watch for preemption."""
        self._require_usable()
        if not self._run.is_acquired:
            self._run.acquire()
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
        """Save a checkpoint if one is due. Saves the state after all steps dispatched before this call.

        Blocks until the state is copied and the previous write has ended; with `asynchronous=False` until the
        checkpoint is written. If a write fails, the next call warns; after three failures in a row it raises the error.

        Args:
            checkpoint_number: Number in the checkpoint's name; None for the value of the step counter.
            check_interval: Save only if a checkpoint is due by the intervals; False saves now.
            metrics: Numbers to store with the checkpoint, including the metric of `best`.

        Returns:
            A handle to wait for the complete checkpoint; None if no checkpoint was due.

        Raises:
            Preempted: The process must end; the state is saved.
            InvalidArgumentError: A state cannot be saved, or `metrics` lacks the metric of `best`.
            FailedPreconditionError: Another process writes into the directory, the manager is closed, or the call is
                inside a step that must not save.
            Exception: A dispatched step failed; nothing is saved.

        Source: tf.train.CheckpointManager.save.
        """
        self._start()
        saves = self._saves
        self._watch.settle()
        saves.calls += 1
        if end_reason() is not None and loop_here() is None:  # a run that draws batches ends at its next draw
            end_if_preempted(before_draw=False)
        saves.writer.report_failure()
        step = saves.step()
        if check_interval and not saves.is_due(step):
            return None
        number = step if checkpoint_number is None else checkpoint_number
        return saves.save(number, metrics, here=not self._asynchronous)

    def sync(self) -> None:
        """Block until the current write has ended. Warns and raises as `save` does.

        Source: tf.train.CheckpointManager.sync.
        """
        self._process.require("used")
        self._watch.settle()
        self._saves.writer.wait()

    def close(self) -> None:
        """Wait for the last write, release the directory, and restore the SIGTERM handlers. A second call does nothing.

        Raises:
            Preempted: The process must end, and no step has run since it was told to; the state is saved.
            Exception: The last save failed, and its error was not raised before.

        Source: raydist's own.
        """
        if self._closed or not self._process.is_this:
            return
        try:
            self._end()
        finally:
            self._closed = True
            unwatch_steps(self._watch)
            self._run.release()

    def _end(self) -> None:
        try:
            self._watch.settle()
            self._saves.writer.join()  # a preemption may come during this wait
            if self._run.is_acquired and sys.exception() is None:  # an exception in flight ends the program anyway
                end_after_last_step()
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
        if may_send_managers():
            return ManagerProxy, (self._watch.key,)
        raise FailedPreconditionError(
            "A CheckpointManager must stay in the process that made it, so it cannot be pickled. Call save() between "
            "two runs, not in a step."
        )
