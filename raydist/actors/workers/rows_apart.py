"""A block on which a worker died, done again row by row on workers that have nothing else to do.

An element is condemned when it has killed two workers while nothing else was under way on them, and these have said so:
see `last_words.py`. A worker that dies without a word may have been killed from outside, so that takes more of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import ray
from ray.exceptions import RayActorError

from raydist.actors.supervision import wait_for
from raydist.actors.workers.worker import unpack_result
from raydist.errors import DeadlineExceededError, RaydistError, UnavailableError
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, StageResult
from raydist.pipelines.engine.kernel import StageSpec
from raydist.pipelines.engine.stages.row_results import join_results

if TYPE_CHECKING:
    from raydist.actors.workers.failed_starts import FailedStarts
    from raydist.actors.workers.handle import WorkerHandle
    from raydist.actors.workers.pool_task import PoolTask
    from raydist.pipelines.elements.items import StageResult
    from raydist.pipelines.engine.kernel import StageSpec

__all__ = ["RowsApart", "RowsDone", "RunRows", "Streak", "isolate"]

_DEATHS = 2  # of which the worker itself says how it ended
_SILENT_DEATHS = 6
_CONDEMNED_IN_A_ROW = 3  # as many elements, one behind the other: then it is not the elements


@final
@dataclass(frozen=True, slots=True)
class RowsDone:
    """What became of some rows on a worker of their own.

    Attributes:
        results: In order, as far as it came.
        worker: Its name.
        words: What it said when its own code ended it; "" for nothing.
    """

    results: Sequence[StageResult]
    worker: str
    words: str = ""


RunRows = Callable[[int], RowsDone]
"""Does the rows from a given one on, each by itself, on a fresh worker, until it dies or there are no more."""


@final
class Streak:
    """How many elements were condemned since one did well: of all blocks of a pool, so that small ones count too."""

    def __init__(self) -> None:
        self.length = 0

    def end(self) -> None:
        """An element did well."""
        self.length = 0


def isolate(spec: StageSpec, block: Block, starts: tuple[int, ...], run_rows: RunRows, streak: Streak) -> StageResult:
    """The result of a block, with an error in the place of each element that kills its worker.

    Raises:
        UnavailableError: Several elements in a row do: something else is wrong.
    """
    trial = _Trial(spec, starts, streak)
    while len(trial.results) < block.num_rows:
        done = run_rows(len(trial.results))
        trial.results.extend(done.results)
        if done.results:
            trial.acquit()
        if len(trial.results) < block.num_rows:
            trial.blame(done)
    return join_results(spec, trial.results)


@final
class _Trial:
    """Results of rows so far, and how often a worker died on the next one."""

    def __init__(self, spec: StageSpec, starts: tuple[int, ...], streak: Streak) -> None:
        self.results: list[StageResult] = []
        self._spec = spec
        self._starts = starts
        self._streak = streak
        self._deaths: list[RowsDone] = []

    def acquit(self) -> None:
        self._deaths = []
        self._streak.end()

    def blame(self, done: RowsDone) -> None:
        self._deaths.append(done)
        if sum(bool(death.words) for death in self._deaths) < _DEATHS and len(self._deaths) < _SILENT_DEATHS:
            return
        self._streak.length += 1
        worker, error = done.worker, self._error(done.worker)
        self._deaths = []
        if self._streak.length >= _CONDEMNED_IN_A_ROW:
            raise UnavailableError(
                f"{error.message} So did the {self._streak.length - 1} elements before it: the function, or a library "
                "that it uses, does not work on input workers.",
                actor=worker,
            )
        num_kernels = len(self._spec.kernels)
        failed = ElementError(error, self._starts[0] + len(self.results))
        self.results.append(StageResult((failed,), (1,) * num_kernels, ("",) * num_kernels))

    def _error(self, worker: str) -> RaydistError:
        labels = " or ".join(kernel.label for kernel in self._spec.kernels)
        index = self._starts[0] + len(self.results)
        words = "; ".join(sorted({death.words for death in self._deaths if death.words}))
        return RaydistError(
            f"A function must not end its process: {labels} ended that of input worker {worker} on element {index} of "
            f"its input, {len(self._deaths)} times{f' ({words})' if words else ''}. It may call os._exit, crash in "
            "native code, or take more memory than there is (Options.input_worker_memory). ignore_errors() passes over "
            "such elements."
        )


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
