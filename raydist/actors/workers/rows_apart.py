"""A block on which a worker died, done again row by row on workers that have nothing else to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, final

import ray
from ray.exceptions import RayActorError

from raydist.actors.supervision import wait_for
from raydist.actors.workers.blame_element import RowsDone, Streak, isolate
from raydist.actors.workers.worker import unpack_result
from raydist.errors import DeadlineExceededError

if TYPE_CHECKING:
    from raydist.actors.workers.failed_starts import FailedStarts
    from raydist.actors.workers.handle import WorkerHandle
    from raydist.actors.workers.pool_task import PoolTask
    from raydist.pipelines.elements.items import StageResult
    from raydist.pipelines.engine.kernel import StageSpec

__all__ = ["RowsApart"]


@final
class RowsApart:
    """Does such blocks for a pool. May be used by several threads.

    Args:
        start_worker: Starts a worker that gets no blocks of others.
        pickle_of: A stage's digest and pickle.
        element_s: Limit of one row.
        failed_starts: Of the pool.
    """

    def __init__(
        self,
        start_worker: Callable[[], WorkerHandle],
        pickle_of: Callable[[StageSpec], tuple[bytes, bytes]],
        element_s: float,
        failed_starts: FailedStarts,
    ) -> None:
        self._start_worker = start_worker
        self._pickle_of = pickle_of
        self._element_s = element_s
        self._failed_starts = failed_starts
        self.condemned = Streak()

    def run(self, task: PoolTask, cancelled: Callable[[], bool]) -> StageResult:
        """The result of a block; an element that kills its worker is an error in its place."""

        def run_rows(first: int) -> RowsDone:
            worker = self._running_worker(cancelled)
            try:
                results = self._rows_on(worker, task, first, cancelled)
                return RowsDone(results, worker.name, worker.words.read())
            finally:
                worker.kill()

        return isolate(task.spec, task.block, task.starts, run_rows, self.condemned)

    def _running_worker(self, cancelled: Callable[[], bool]) -> WorkerHandle:
        """A worker that runs. The caller kills it."""
        while True:
            worker = self._start_worker()
            try:
                worker.await_start(cancelled)
            except RayActorError as error:
                self._failed_starts.add(worker.name, error)
            except BaseException:
                worker.kill()
                raise
            else:
                return worker

    def _rows_on(
        self, worker: WorkerHandle, task: PoolTask, first: int, cancelled: Callable[[], bool]
    ) -> list[StageResult]:
        """The results of single rows, from row `first` on, until the worker dies or there are no more."""
        digest, stage = self._pickle_of(task.spec)
        results: list[StageResult] = []
        # One by one: what a worker had done may not have been sent yet when the next row ends its process.
        for row in range(first, task.block.num_rows):
            block, starts = task.block.slice(row, row + 1), tuple(start + row for start in task.starts)
            ref = worker.run(digest, stage, block, starts)
            if not wait_for(ref, self._element_s, cancelled, actor=worker.name):
                raise DeadlineExceededError(
                    f"Input worker {worker.name} must finish element {starts[0]} of the input of stage "
                    f"{task.spec.name} within {self._element_s:g} s (Timeouts.element_s), and has not. The worker was "
                    "killed. If the function is only slow, raise the limit."
                )
            try:
                results.append(unpack_result(ray.get(ref)))
            except RayActorError:
                break
        return results
