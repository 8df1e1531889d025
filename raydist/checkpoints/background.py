"""Writing beside training: one write at a time, and its failures told where the program will hear of them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import final

from raydist.errors import DeadlineExceededError
from raydist.foreign_errors import what_was_raised
from raydist.pipelines.formats.files import shown_uri

__all__ = ["BackgroundWriter", "SaveHandle"]

_MOST_FAILURES = 3


@final
class SaveHandle:
    """A checkpoint that is being written, as `CheckpointManager.save` gives it.

    Attributes:
        path: Where it will be. Nothing is there before it is whole.
        was_told: Somebody has heard why it failed: by a warning, or an exception.
        was_raised: By an exception.

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
        """Whether it is whole, or has failed. Does not wait.

        Returns:
            True also after a failure, which `wait` tells.

        Source: concurrent.futures.Future.done.
        """
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it is whole.

        Args:
            timeout_s: How long; None for as long as it takes: limits of what it waits for apply.

        Raises:
            Exception: Why it failed: nothing was committed then.
            DeadlineExceededError: It takes longer; it goes on being written.

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
        """Why it failed; None while it has not.

        Source: concurrent.futures.Future.exception, which waits.
        """
        return self._error

    def end(self, error: BaseException | None = None) -> None:
        """It is whole, or has failed. For who writes it.

        Args:
            error: Why it failed.

        Source: concurrent.futures.Future.set_result and set_exception.
        """
        self._error = error
        self._ended.set()


@final
class BackgroundWriter:
    """Writes checkpoints in a thread each, one after the other. A program that ends waits for the last one."""

    def __init__(self) -> None:
        self._last: SaveHandle | None = None
        self._thread: threading.Thread | None = None
        self._num_failures = 0  # in a row

    def submit(self, path: str, write: Callable[[], None], *, here: bool = False) -> SaveHandle:
        """Write something; waits for what is being written.

        Args:
            path: What it is called.
            write: Does it.
            here: In this thread.
        """
        self.wait()
        if here:
            return self.run(path, write)
        self._last = handle = SaveHandle(path)
        # No daemon: what was begun before the end of a program is finished.
        self._thread = threading.Thread(target=self._run, args=(write, handle), name="raydist-checkpoint")
        self._thread.start()
        return handle

    def run(self, path: str, write: Callable[[], None]) -> SaveHandle:
        """As `submit` in this thread; but nobody is told here of failures before, so that any thread may do it."""
        if self._thread is not None:
            self._thread.join()
        self._last = handle = SaveHandle(path)
        self._run(write, handle)
        return handle

    def _run(self, write: Callable[[], None], handle: SaveHandle) -> None:
        try:
            write()
        except BaseException as error:
            self._num_failures += 1
            handle.end(error)
            if not isinstance(error, Exception) and threading.current_thread() is not self._thread:
                raise
        else:
            self._num_failures = 0
            handle.end()

    @property
    def num_failures(self) -> int:
        """How many writes have failed in a row."""
        return self._num_failures

    @property
    def is_busy(self) -> bool:
        """Whether something is being written."""
        return self._last is not None and not self._last.done()

    def wait(self) -> None:
        """Return once nothing is being written, and failures were told: warns of one, raises the third in a row."""
        self.join()
        self.tell()

    def join(self) -> None:
        """Return once nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def tell(self) -> None:
        """Say what has failed, once. Does not wait.

        Raises:
            Exception: The third failure in a row.
        """
        last = self._last
        error = None if last is None or last.was_told else last.error
        if last is None or error is None:
            return
        last.was_told = True
        if self._num_failures >= _MOST_FAILURES:
            error.add_note(f"This is save {self._num_failures} in a row that has failed: {shown_uri(last.path)!r}.")
            last.was_raised = True
            raise what_was_raised(error)
        warnings.warn(
            f"The checkpoint {shown_uri(last.path)!r} could not be saved: {type(error).__name__}: {error!s:.500} "
            f"Training goes on; what was saved before is still there. The {_MOST_FAILURES}rd failure in a row is an "
            "error.",
            RuntimeWarning,
            stacklevel=4,
        )

    def finish(self) -> None:
        """Return once nothing is being written. A failure counts as told: one more save says what ends the process."""
        self.join()
        if self._last is not None:
            self._last.was_told = self._last.was_raised = True

    def close(self) -> None:
        """Wait for the last write; raises why it failed, unless somebody was told by an exception."""
        self.join()
        last, self._last = self._last, None
        if last is not None and last.error is not None and not last.was_raised:
            raise what_was_raised(last.error)
