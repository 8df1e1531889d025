"""The saves of one manager: due dates, checkpoint numbers, and writing in the background, one write at a time."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, final

from raydist.actors.metric_counters import SaveMetrics
from raydist.checkpoints.capture import StagingBuffers
from raydist.checkpoints.checkpoint import StartedSave, start_save
from raydist.checkpoints.contents import CheckpointContents
from raydist.checkpoints.listing import (
    DETAILS,
    FoundCheckpoint,
    KeptCheckpoint,
    SaveInterval,
    as_metrics,
    require_number,
)
from raydist.checkpoints.run_directory import RunDirectory
from raydist.core.errors import DeadlineExceededError
from raydist.core.exception_utils import what_was_raised
from raydist.pipelines.formats.files import shown_uri

MAX_FAILURES = 3
"""Number of failed writes in a row after which the failure is raised."""


@final
class SaveHandle:
    """The handle of a checkpoint that is being written, as returned by `CheckpointManager.save`.

    Attributes:
        path: Path of the checkpoint. Nothing exists at the path before the checkpoint is complete.
        was_told: True once the failure of the save was reported by a warning or an exception.
        was_raised: True once the failure was reported by an exception.

    >>> import tempfile
    >>> manager = rd.CheckpointManager(rd.Checkpoint(progress=rd.State(epoch=1)), tempfile.mkdtemp(), max_to_keep=1)
    >>> handle = manager.save()
    >>> handle.wait()
    >>> handle.done()
    True
    >>> manager.close()

    Source: raydist's own; the handle of torch.distributed.checkpoint.async_save.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.was_told = self.was_raised = False
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        state = "failed" if self._error else "whole" if self.done() else "being written"
        return f"SaveHandle({shown_uri(self.path)!r}, {state})"

    def done(self) -> bool:
        """Return True once the save has completed or failed. Does not block.

        Returns:
            True also after a failure; `wait` raises the failure.

        Source: concurrent.futures.Future.done.
        """
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the checkpoint is complete.

        Args:
            timeout_s: Limit in seconds. None: no limit of its own; limits of the operations inside the save apply.

        Raises:
            Exception: The save failed; nothing was committed.
            DeadlineExceededError: The save takes longer than `timeout_s`; the save continues.

        Source: concurrent.futures.Future.result.
        """
        if not self._ended.wait(timeout_s):
            raise DeadlineExceededError(
                f"The checkpoint {shown_uri(self.path)!r} must be written within {timeout_s:g} s, it is not yet. Wait "
                "longer."
            )
        if self._error is not None:
            self.was_told = self.was_raised = True
            raise what_was_raised(self._error)

    @property
    def error(self) -> BaseException | None:
        """The exception of a failed save; None before and without a failure.

        Source: concurrent.futures.Future.exception, which waits.
        """
        return self._error

    def end(self, error: BaseException | None = None) -> None:
        """Mark the save as complete or failed. Called by the writer.

        Args:
            error: The exception of a failed save.

        Source: concurrent.futures.Future.set_result and set_exception.
        """
        self._error = error
        self._ended.set()


@final
class BackgroundWriter:
    """A writer of one checkpoint at a time, each in a thread. The interpreter waits for the last write at exit."""

    def __init__(self) -> None:
        self._last: SaveHandle | None = None
        self._thread: threading.Thread | None = None
        self.num_failures = 0
        """Number of consecutive failures."""

    def submit(self, path: str, write: Callable[[], None], *, here: bool = False) -> SaveHandle:
        """Wait for the previous write and report its failure; then start this one, or do it `here`."""
        self.wait()
        if here:
            return self.run(path, write)
        self._last = handle = SaveHandle(path)
        # Not a daemon thread: a write that has begun is finished before the interpreter exits.
        self._thread = threading.Thread(target=self._run, args=(write, handle), name="raydist-checkpoint")
        self._thread.start()
        return handle

    def run(self, path: str, write: Callable[[], None]) -> SaveHandle:
        """Write in the calling thread after the previous write. Thread-safe: reports no earlier failure."""
        if self._thread is not None:
            self._thread.join()
        self._last = handle = SaveHandle(path)
        self._run(write, handle)
        return handle

    def _run(self, write: Callable[[], None], handle: SaveHandle) -> None:
        try:
            write()
        except BaseException as error:
            self.num_failures += 1
            handle.end(error)
            if not isinstance(error, Exception) and threading.current_thread() is not self._thread:
                raise
        else:
            self.num_failures = 0
            handle.end()

    def wait(self) -> None:
        """Block until no write is running, then report a failure: the first two in a row warn, the third raises."""
        self.join()
        self.report_failure()

    def join(self) -> None:
        """Block until no write is running."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def report_failure(self) -> None:
        """Report the failure of the last write once, by a warning. Does not block.

        Raises:
            Exception: The write is the third or later failure in a row.
        """
        last = self._last
        error = None if last is None or last.was_told else last.error
        if last is None or error is None:
            return
        last.was_told = True
        if self.num_failures >= MAX_FAILURES:
            error.add_note(f"This is save {self.num_failures} in a row that has failed: {shown_uri(last.path)!r}.")
            last.was_raised = True
            raise what_was_raised(error)
        warnings.warn(
            f"The checkpoint {shown_uri(last.path)!r} could not be saved: {type(error).__name__}: {error!s:.500} "
            f"Training goes on; what was saved before is still there. The {MAX_FAILURES}rd failure in a row is an "
            "error.",
            RuntimeWarning,
            stacklevel=4,
        )

    def join_silently(self) -> None:
        """Block until no write is running. Count a failure as reported: the error that ends the process will say so."""
        self.join()
        if self._last is not None:
            self._last.was_told = self._last.was_raised = True

    def close(self) -> None:
        """Block until no write is running; raise the failure of the last write unless it was raised before."""
        self.join()
        last, self._last = self._last, None
        if last is not None and last.error is not None and not last.was_raised:
            raise what_was_raised(last.error)


@final
class ManagerSaves:
    """The sequence of one manager's saves. Used by the training thread, or by the thread that follows a run instead.

    Attributes:
        calls: Number of times the program has called `save`.
    """

    def __init__(self, contents: CheckpointContents, run: RunDirectory, interval: SaveInterval, counter: Any) -> None:
        self.contents, self.run, self.interval, self.counter = contents, run, interval, counter
        self.writer = BackgroundWriter()
        self._staging = StagingBuffers()
        self._metrics = SaveMetrics(shown_uri(run.path))
        self.calls = 0
        self.last_step: int | None = 0 if counter is None else None
        self.last_save = time.monotonic()

    def step(self) -> int:
        """Return the value of the step counter."""
        counter = self.counter
        if counter is None:
            return self.calls
        value = counter.item() if hasattr(counter, "item") else counter() if callable(counter) else counter
        return int(value)

    def is_due(self, step: int) -> bool:
        """Return True if the interval since the last save has passed at this step."""
        seconds = time.monotonic() - self.last_save
        return self.interval.is_due(step, since_step=self.last_step, seconds=seconds)

    def start_intervals(self) -> None:
        """Count intervals from the current step, because nothing was restored."""
        self.last_step = self.step()

    def continue_from(self, found: FoundCheckpoint) -> None:
        """Count intervals from a restored checkpoint."""
        calls = found.details.get("calls", found.kept.number)
        self.calls = calls if type(calls) is int else found.kept.number
        self.last_step = self.step()
        self.last_save = time.monotonic()

    def save(self, number: int, metrics: Mapping[str, Any] | None, *, here: bool) -> SaveHandle:
        """Save the current state.

        Raises:
            InvalidArgumentError: The number is invalid, or the metrics lack the metric of `best`.
            Exception: An error before anything was written, or the third failed write in a row.
        """
        kept = self.kept(number, metrics)
        self.writer.wait()
        began = time.monotonic()
        staging = None if here else self._staging
        details = self.details_of(kept, self.calls)
        with self.contents.with_last_fit():
            started = start_save(self.contents, self.run.files_of(kept), details, staging=staging)
        self.note_begun(self.step(), time.monotonic() - began)
        return self.writer.submit(self.run.path_of(kept), lambda: self.write(started, kept), here=here)

    def kept(self, number: int, metrics: Mapping[str, Any] | None) -> KeptCheckpoint:
        """Return the description of the checkpoint that is about to be saved."""
        require_number(number)
        best = self.run.retention.best
        return self.run.begin(number, as_metrics(metrics, None if best is None else best.metric))

    def details_of(self, kept: KeptCheckpoint, calls: int) -> dict[str, Any]:
        """Return the details for the manifest, by which the checkpoint is found and resumed."""
        return {DETAILS: {**self.run.details_of(kept), "calls": calls}}

    def note_begun(self, step: int | None, pause_s: float) -> None:
        """Record that a save of this step has begun, and that training paused for `pause_s`."""
        self.last_step, self.last_save = step, time.monotonic()
        self._metrics.note_save(pause_s)

    def write(self, started: StartedSave, kept: KeptCheckpoint) -> None:
        """Write a save that has begun, and commit it."""
        self.run.save(kept, started.write)
