"""`rd.summary.SummaryWriter`, and its counterpart in steps on replicas."""

from __future__ import annotations

import contextlib
import os
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, final

from raydist.core.errors import DeadlineExceededError, FailedPreconditionError, InvalidArgumentError
from raydist.pipelines.formats.files import local_file
from raydist.summary.histograms import HistogramCounts
from raydist.summary.record import Record, step_number
from raydist.summary.recording import Destination, as_destination, report_pickled, step_sink

if TYPE_CHECKING:
    from raydist.summary.event_file import EventFile

_OPEN: weakref.WeakSet[SummaryWriter] = weakref.WeakSet()  # of this process

_MOST_AT_ONE_STEP = 10  # consecutive records of a name at one step, after which the step seems stuck


class StepsUnderWay(Protocol):
    """Dispatched steps of a strategy, which may record for a writer."""

    def finish(self) -> None:
        """Block until the steps have ended, and pass their records to writers."""

    def until_now(self) -> Callable[[], None]:
        """Return a function that waits, in any thread, for the steps dispatched so far, without their errors."""


@final
class SummaryWriter:
    """A writer of a TensorBoard event file. Created by :func:`create_file_writer`.

    Steps on replicas may use the writer, too: their records are sent to the driver with the results, and are in the
    file after `flush` or `close`, or some time after the results have arrived. A thread writes; no step waits for it.

    Args:
        logdir: The directory of the event file.
        file: The event file.

    Attributes:
        logdir: The directory of the event file.
        key: Unique id of the writer, in all processes.

    Source: tf.summary.SummaryWriter.

    >>> import tempfile
    >>> with rd.summary.create_file_writer(tempfile.mkdtemp()) as writer:
    ...     with writer.as_default(step=0):
    ...         rd.summary.scalar("loss", 0.5)
    True
    """

    def __init__(self, logdir: str, file: EventFile) -> None:
        self.logdir = logdir
        self.key = uuid.uuid4().hex
        self._file = file
        self._steps: weakref.WeakSet[Any] = weakref.WeakSet()
        self._held: dict[str, tuple[int, int]] = {}
        self._remarked: set[str] = set()
        self._remarks: list[str] = []
        _OPEN.add(self)
        weakref.finalize(self, file.close)

    @property
    def weight(self) -> float | None:
        """The weight of values from the driver.

        >>> import tempfile
        >>> with rd.summary.create_file_writer(tempfile.mkdtemp()) as writer:
        ...     writer.weight
        1.0
        """
        return 1.0

    @contextlib.contextmanager
    def as_default(self, step: Any = None) -> Iterator[SummaryWriter]:
        """Make this the default writer for the `with` block, including steps that are dispatched inside.

        Leaving the block does not wait, and does not flush.

        Args:
            step: Step of calls without a step, read now; None: the global step at the time of the call.

        Raises:
            FailedPreconditionError: The writer is closed.

        Source: tf.summary.SummaryWriter.as_default.

        >>> import tempfile
        >>> with rd.summary.create_file_writer(tempfile.mkdtemp()) as writer, writer.as_default(step=7):
        ...     rd.summary.text("note", "begins here")
        True
        """
        self._require_open()
        self.warn()
        with as_destination(Destination(self.key, self, step_number(step), self)):
            yield self

    def flush(self) -> None:
        """Block until everything recorded so far is in the file.

        Waits for steps that were dispatched with this writer (limit: `Timeouts.step_s`), and for the writing thread
        (limit: 60 s).

        Raises:
            Exception: An unreported error of a dispatched step.
            FailedPreconditionError: The file cannot be written.

        Source: tf.summary.SummaryWriter.flush.

        >>> import tempfile
        >>> with rd.summary.create_file_writer(tempfile.mkdtemp()) as writer:
        ...     writer.flush()
        """
        self._require_open()
        self._await_steps()
        self._file.flush()
        self.warn()

    def close(self) -> None:
        """Flush and close the file. Blocks as `flush` does. A second call does nothing.

        Raises:
            Exception: An unreported error of a dispatched step; the file is closed all the same.
            FailedPreconditionError: The file could not be written.

        Source: tf.summary.SummaryWriter.close.

        >>> import tempfile
        >>> writer = rd.summary.create_file_writer(tempfile.mkdtemp())
        >>> writer.close()
        """
        if self._file.closed:
            return
        try:
            self._await_steps()
            self._file.flush()
        finally:
            self._file.close()
        self.warn()

    def __enter__(self) -> SummaryWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        else:  # a second error would hide the first
            self._file.close()

    def take(self, record: Record) -> None:
        """Queue a record for writing. Does not block. Thread-safe.

        Args:
            record: A settled record of the driver, or the merged record of replicas.

        Raises:
            FailedPreconditionError: The writer is closed.

        Source: raydist's own.
        """
        self._file.add(record)
        self._look_at_step(record)
        if isinstance(record.data, HistogramCounts) and record.data.left_out:
            self._remark(
                f"nan {record.name}",
                f"Histogram {record.name!r} must be of finite numbers to show all of them, but {record.data.left_out} "
                f"at step {record.step} are NaN or infinite: these are left out.",
            )

    def _look_at_step(self, record: Record) -> None:
        step, count = self._held.get(record.name, (record.step, 0))
        count = count + 1 if step == record.step else 1
        self._held[record.name] = record.step, count
        if count == _MOST_AT_ONE_STEP:
            self._remark(
                "step",
                f"The step of summaries must advance, but {record.name!r} was recorded {count} times at step {step}. "
                "Pass step=, or add 1 in each step to rd.get_global_step(), called in the scope of your strategy "
                "(outside of a scope it is another number).",
            )

    def _remark(self, key: str, text: str) -> None:
        if key not in self._remarked:
            self._remarked.add(key)
            self._remarks.append(text)

    def warn(self) -> None:
        """Emit pending warnings, once. Called by functions that the program calls, not when records arrive.

        Source: raydist's own.
        """
        remarks, self._remarks = self._remarks, []
        for remark in (*remarks, *self._file.take_remarks()):
            warnings.warn(remark, stacklevel=3)

    def follow(self, steps: StepsUnderWay) -> None:
        """Wait for the steps of a strategy before the file is closed, because they may record for this writer.

        Args:
            steps: Dispatched steps of the strategy; weakly referenced.

        Source: raydist's own.
        """
        self._steps.add(steps)

    def until_now(self) -> Callable[[], None]:
        """Return a function that writes to disk what has been recorded so far, also by dispatched steps.

        The function may be called in any thread. It blocks until these steps have ended (limit: `Timeouts.step_s`) and
        the file is written (limit: 60 s). It raises nothing: the writer warns of a file that cannot be written.

        Source: raydist's own.
        """
        steps, file = [each.until_now() for each in list(self._steps)], self._file

        def flush() -> None:
            for wait in steps:
                wait()
            with contextlib.suppress(FailedPreconditionError, DeadlineExceededError):
                file.flush(to_disk=True)

        return flush

    def _await_steps(self) -> None:
        for steps in list(self._steps):
            steps.finish()

    def _require_open(self) -> None:
        if self._file.closed:
            raise FailedPreconditionError(
                f"The writer must be open to be used, that of {self.logdir!r} was closed. Create a new one."
            )

    def __reduce__(self) -> tuple[Any, ...]:
        if not report_pickled(self):
            raise FailedPreconditionError(
                f"A writer must stay in the process that made it, but that of {self.logdir!r} was to be pickled or "
                "copied. Create one where it is used; steps given to strategy.run may use the driver's."
            )
        return _WriterOfDriver, (self.key, self.logdir)


@final
class _WriterOfDriver:
    """A writer inside a step on a replica: records go to the driver."""

    def __init__(self, key: str, logdir: str) -> None:
        self.key, self.logdir = key, logdir

    @contextlib.contextmanager
    def as_default(self, step: Any = None) -> Iterator[_WriterOfDriver]:
        found = step_sink()
        if found is None:
            raise FailedPreconditionError(
                f"The writer of {self.logdir!r} belongs to the driver: use it there, or in a step while that runs."
            )
        with as_destination(Destination(self.key, found, step_number(step))):
            yield self

    def flush(self) -> NoReturn:
        self._refuse("flush")

    def close(self) -> NoReturn:
        self._refuse("close")

    def _refuse(self, what: str) -> NoReturn:
        raise FailedPreconditionError(
            f"{what} of a writer is for the driver: this code runs inside of a replica, in strategy.run. Call it there."
        )


def pending_summaries() -> Callable[[], None]:
    """Return a function that writes to disk everything that open writers of this process have received so far.

    Called before a checkpoint is committed: a program that resumes from the checkpoint never records these points
    again. See `SummaryWriter.until_now`.

    >>> pending_summaries()()
    """
    flushes = [writer.until_now() for writer in list(_OPEN) if not writer._file.closed]

    def flush_all() -> None:
        for flush in flushes:
            flush()

    return flush_all


def flush_writers() -> None:
    """Write to disk what open writers of this process have received. Waits for no steps; never raises."""
    for writer in list(_OPEN):
        with contextlib.suppress(FailedPreconditionError, DeadlineExceededError):
            writer._file.flush(to_disk=True)


def create_file_writer(
    logdir: str | os.PathLike[str],
    flush_millis: int = 1000,
    filename_suffix: str = "",
    *,
    purge_step: int | None = None,
) -> SummaryWriter:
    """Create an event file in a directory, for TensorBoard.

    Args:
        logdir: The directory, on a disk of the driver's machine; created if missing.
        flush_millis: Maximum milliseconds until a record is in the file.
        filename_suffix: Suffix of the file's name.
        purge_step: Step from which TensorBoard drops the data of earlier files of the directory, for a program that
            resumes from a checkpoint.

    Returns:
        The writer. Close it, or use it in a `with`; a writer that is dropped is closed, too.

    Raises:
        InvalidArgumentError: The directory cannot be created or written to, or is a URI of another file system.

    Source: tf.summary.create_file_writer; `purge_step` is that of torch's SummaryWriter.

    >>> import tempfile
    >>> writer = rd.summary.create_file_writer(tempfile.mkdtemp())
    >>> with writer.as_default():
    ...     for step in range(3):
    ...         _ = rd.summary.scalar("loss", 1 / (step + 1), step=step)
    >>> writer.close()
    """
    if not isinstance(flush_millis, int) or flush_millis < 0:
        raise InvalidArgumentError(f"flush_millis must be a number of milliseconds >= 0, got {flush_millis!r}.")
    from raydist.summary.event_file import EventFile, open_event_file  # loads protobuf in 0.1 s: replicas need none

    folder = local_file(logdir, "The directory of summaries")
    path, file = open_event_file(folder, filename_suffix)
    return SummaryWriter(folder, EventFile(path, file, flush_s=flush_millis / 1000, purge_step=step_number(purge_step)))
