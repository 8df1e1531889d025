"""An executor on threads of this process: numpy, Arrow, image codecs and I/O release the GIL."""

from __future__ import annotations

import queue
import threading
import weakref
from typing import final

from raydist.errors import CancelledError, DeadlineExceededError
from raydist.options import Timeouts
from raydist.pipelines.blocks import Block
from raydist.pipelines.executor import Executor, Pending, StageResult, StageSpec, run_stage
from raydist.pipelines.meters import Place

__all__ = ["ThreadExecutor"]


@final
class _Task(Pending):
    """One block of work, and its result."""

    def __init__(self, spec: StageSpec, block: Block, starts: tuple[int, ...], limit_s: float) -> None:
        self._spec = spec
        self._block = block
        self._starts = starts
        self._limit_s = limit_s
        self._done = threading.Event()
        self._result: StageResult | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result = run_stage(self._spec, self._block, self._starts)
        except BaseException as error:  # SystemExit in a user's function: raised where the result is waited for
            self._error = error
        self._done.set()

    def cancel(self) -> None:
        self._error = CancelledError(f"Stage {self._spec.name} was closed before this block was begun.")
        self._done.set()

    def result(self) -> StageResult:
        if not self._done.wait(self._limit_s):
            raise DeadlineExceededError(
                f"Stage {self._spec.name} must finish a block of {self._block.num_rows} elements within "
                f"{self._limit_s} s, and has not. Is its function waiting for something?"
            )
        if self._result is None:
            raise self._error or CancelledError("raydist bug: a task ended without result and without error.")
        return self._result


_Tasks = queue.SimpleQueue["_Task | None"]


def _work(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task  # an idle thread must not keep a block alive


def _stop(tasks: _Tasks, num_threads: int) -> None:
    """Cancel what has not begun and let every thread end."""
    while True:
        try:
            task = tasks.get_nowait()
        except queue.Empty:
            break
        if task is not None:
            task.cancel()
    for _ in range(num_threads):
        tasks.put(None)


@final
class ThreadExecutor(Executor):
    """`num_threads` threads, started with the first block and ended by `close()` or when nobody holds the executor."""

    place: Place = "threads"

    def __init__(self, num_threads: int, timeouts: Timeouts | None = None) -> None:
        limits = timeouts or Timeouts()
        self.window = self.num_workers = num_threads
        self._limit_s = limits.element_s
        self._close_s = limits.close_s
        self._tasks: _Tasks = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        # The threads hold the queue, not the executor: an abandoned one is collected and stops them.
        self._finalizer = weakref.finalize(self, _stop, self._tasks, num_threads)

    def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        if not self._finalizer.alive:
            raise CancelledError("This executor is closed and takes no more work.")
        if not self._threads:
            self._start()
        task = _Task(spec, block, starts, self._limit_s)
        self._tasks.put(task)
        return task

    def _start(self) -> None:
        for number in range(self.window):
            thread = threading.Thread(target=_work, args=(self._tasks,), name=f"raydist-map-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        self._finalizer()
        for thread in self._threads:
            thread.join(self._close_s)
        self._threads = []
