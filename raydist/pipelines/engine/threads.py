"""An executor on threads of this process. Numpy, Arrow, image codecs and I/O release the GIL."""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from typing import final

from raydist.core.errors import CancelledError, DeadlineExceededError
from raydist.core.thread_shutdown import end_at_exit
from raydist.options import Timeouts
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import StageResult
from raydist.pipelines.engine.budget import Budget
from raydist.pipelines.engine.executor import Executor, Pending
from raydist.pipelines.engine.kernel import StageSpec, run_stage
from raydist.pipelines.engine.prefetch_thread import CLOSE_S, join_threads
from raydist.pipelines.metering.meter import StagePlace


@final
class _Task(Pending):
    """One block of work and its result."""

    def __init__(self, spec: StageSpec, block: Block, starts: tuple[int, ...], limit_s: float) -> None:
        self._spec = spec
        self._block = block
        self._starts = starts
        self._limit_s = limit_s
        self._done = threading.Event()
        self._result: StageResult | None = None
        self._error: BaseException | None = None
        self.thread_name = ""

    def run(self) -> None:
        self.thread_name = threading.current_thread().name
        try:
            self._result = run_stage(self._spec, self._block, self._starts)
        except BaseException as error:  # SystemExit in a user's function: raised in `result`
            self._error = error
        self._done.set()

    def done(self) -> bool:
        return self._done.is_set()

    def cancel(self) -> None:
        if not self._done.is_set():
            when = "while this block was worked on" if self.thread_name else "before this block was begun"
            self._error = CancelledError(f"Stage {self._spec.name} was closed {when}.")
            self._done.set()

    def __str__(self) -> str:
        labels = ", ".join(kernel.label for kernel in self._spec.kernels)
        return f"stage {self._spec.name}: {labels}, from element {self._starts[0]} of its input on"

    def result(self) -> StageResult:
        if not self._done.wait(self._limit_s):
            raise DeadlineExceededError(
                f"Stage {self._spec.name} must finish a block of {self._block.num_rows} elements within "
                f"{self._limit_s} s, and has not. Is its function waiting for something?"
            )
        if self._result is None:
            raise self._error or CancelledError(
                f"raydist bug: a block of stage {self._spec.name} ended without a result and without an error."
            )
        return self._result


_Tasks = queue.SimpleQueue["_Task | None"]


def _work(tasks: _Tasks, budget: Budget) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task  # an idle thread must not keep a block alive
    budget.give()


def _stop(tasks: _Tasks, threads: list[threading.Thread]) -> None:
    """Cancel tasks that have not begun, and let every thread end."""
    while True:
        try:
            task = tasks.get_nowait()
        except queue.Empty:
            break
        if task is not None:
            task.cancel()
    for _ in threads:
        tasks.put(None)


@final
class ThreadExecutor(Executor):
    """An executor on `num_threads` threads, from the first block until `close()` or garbage collection.

    Args:
        num_threads: Number of threads, limited by `budget`. Without any, the caller's thread works.
        timeouts: `element_s` for one block.
        budget: Budget for threads. Each thread returns its share when it ends.
    """

    place: StagePlace = "threads"

    def __init__(self, num_threads: int, timeouts: Timeouts | None = None, budget: Budget | None = None) -> None:
        limits = timeouts or Timeouts()
        self._budget = budget or Budget()
        self.window = self.num_workers = num_threads
        self._limit_s = limits.element_s
        self._close_s = min(limits.close_s, CLOSE_S)
        self._tasks: _Tasks = queue.SimpleQueue()
        self._under_way: weakref.WeakSet[_Task] = weakref.WeakSet()
        self._starting = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._numbers = itertools.count()
        self._staying = 0  # threads without a request to end
        # The threads refer to the queue, not to the executor: an abandoned executor is collected and stops them.
        self._finalizer = weakref.finalize(self, _stop, self._tasks, self._threads)

    def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        task = _Task(spec, block, starts, self._limit_s)
        with self._starting:  # a prefetch thread, its consumer and `close` may come at the same time
            if not self._finalizer.alive:
                raise CancelledError(f"{spec.name} needs an open executor, and this one is closed. Use a new iterator.")
            self._start()
            self._under_way.add(task)
            is_sent = self._staying > 0
            if is_sent:
                self._tasks.put(task)
        if not is_sent:
            task.run()
        return task

    def resize(self, num_threads: int) -> int:
        """Set the number of threads, as far as the budget allows, and return it. A thread that ends finishes its block.

        With 0 threads, the caller's thread works.
        """
        with self._starting:
            if not self._finalizer.alive:
                return 0
            for _ in range(self._staying - num_threads):
                self._tasks.put(None)
            self._staying = min(self._staying, num_threads)
            self.window = self.num_workers = num_threads
            self._start()
            return self._staying

    def _start(self) -> None:
        self._threads[:] = [thread for thread in self._threads if thread.is_alive()]
        if self._staying == self.num_workers:
            return
        for _ in range(self._budget.take(self.num_workers - self._staying)):
            name = f"raydist-map-{next(self._numbers)}"
            thread = threading.Thread(target=_work, args=(self._tasks, self._budget), name=name, daemon=True)
            end_at_exit(thread, self._finalizer)
            thread.start()
            self._threads.append(thread)
            self._staying += 1

    def close(self) -> None:
        """End the threads and wake callers of `result`. A thread whose function does not return is left behind."""
        with self._starting:
            self._finalizer()
            threads, self._threads = self._threads, []
        join_threads(threads, self._work_of, self._close_s)
        for task in tuple(self._under_way):
            task.cancel()

    def _work_of(self, name: str) -> str:
        return ", ".join(str(task) for task in tuple(self._under_way) if task.thread_name == name and not task.done())
