"""Crash bisection: a block on which a worker died runs again row by row, on workers that get no other blocks.

The block is not halved: one fresh worker runs row after row until it dies, and the next one continues at that row. An
element becomes an error when two workers died on it and reported an exit reason. A worker that dies without a reason
may have been killed from outside, so the error then takes more deaths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import ray
from ray.exceptions import RayActorError

from raydist.actors.supervision import wait_for
from raydist.actors.workers.mapped_columns import LostResultError
from raydist.actors.workers.result_recipes import Recipe, make_again
from raydist.actors.workers.stored_results import with_row_ids
from raydist.actors.workers.worker import unpack_result
from raydist.core.errors import DeadlineExceededError, RaydistError, UnavailableError
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, StageResult
from raydist.pipelines.engine.executor import Executor
from raydist.pipelines.engine.kernel import StageSpec, join_results

if TYPE_CHECKING:
    from raydist.actors.workers.handle import FailedStarts, WorkerHandle

_DEATHS = 2  # with an exit reason
_SILENT_DEATHS = 6
_FAILED_IN_A_ROW = 3  # if this many elements in a row fail, the cause is not the elements


@final
@dataclass(frozen=True, slots=True)
class RowsDone:
    """The results of rows on a fresh worker.

    Attributes:
        results: Results of the finished rows, in order.
        worker: Name of the worker.
        exit_reason: Exit reason of the worker; "" for none.
    """

    results: Sequence[StageResult]
    worker: str
    exit_reason: str = ""


RunRows = Callable[[int], RowsDone]
"""Runs rows one by one on a fresh worker, from a given row on, until the worker dies or no row is left."""


@final
class Streak:
    """The number of failed elements in a row, over all blocks of a pool."""

    def __init__(self) -> None:
        self.length = 0

    def end(self) -> None:
        """Reset the number because an element succeeded."""
        self.length = 0


def isolate(spec: StageSpec, block: Block, starts: tuple[int, ...], run_rows: RunRows, streak: Streak) -> StageResult:
    """Return the result of a block, with an error at the position of each element that kills workers.

    Raises:
        UnavailableError: Several elements in a row kill workers, so the cause is something else.
    """
    rows = _RowByRow(spec, starts, streak)
    while len(rows.results) < block.num_rows:
        done = run_rows(len(rows.results))
        rows.results.extend(done.results)
        if done.results:
            rows.note_success()
        if len(rows.results) < block.num_rows:
            rows.note_death(done)
    return join_results(spec, rows.results)


@final
class _RowByRow:
    """The results of rows so far, and the worker deaths on the next row."""

    def __init__(self, spec: StageSpec, starts: tuple[int, ...], streak: Streak) -> None:
        self.results: list[StageResult] = []
        self._spec = spec
        self._starts = starts
        self._streak = streak
        self._deaths: list[RowsDone] = []

    def note_success(self) -> None:
        self._deaths = []
        self._streak.end()

    def note_death(self, done: RowsDone) -> None:
        self._deaths.append(done)
        if sum(bool(death.exit_reason) for death in self._deaths) < _DEATHS and len(self._deaths) < _SILENT_DEATHS:
            return
        self._streak.length += 1
        worker, error = done.worker, self._error(done.worker)
        self._deaths = []
        if self._streak.length >= _FAILED_IN_A_ROW:
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
        reasons = "; ".join(sorted({death.exit_reason for death in self._deaths if death.exit_reason}))
        return RaydistError(
            f"A function must not end its process: {labels} ended that of input worker {worker} on element {index} of "
            f"its input, {len(self._deaths)} times{f' ({reasons})' if reasons else ''}. It may call os._exit, crash in "
            "native code, or take more memory than there is (Options.input_worker_memory). ignore_errors() skips "
            "such elements."
        )


@final
class CrashBisection:
    """Crash bisection for the blocks of a pool. Thread-safe.

    Args:
        pool: The pool, for the recipes of stored results.
        start_worker: Starts a worker that gets no other blocks.
        pickle_of: Returns the digest and pickle of a stage.
        element_s: Limit for one row in seconds.
        failed_starts: Counter of the pool's failed starts.
    """

    def __init__(
        self,
        pool: Executor,
        start_worker: Callable[[], WorkerHandle],
        pickle_of: Callable[[StageSpec], tuple[bytes, bytes]],
        element_s: float,
        failed_starts: FailedStarts,
    ) -> None:
        self._pool = pool
        self._start_worker = start_worker
        self._pickle_of = pickle_of
        self._element_s = element_s
        self._failed_starts = failed_starts
        self.failed_in_a_row = Streak()

    def run(self, spec: StageSpec, block: Block, starts: tuple[int, ...], cancelled: Callable[[], bool]) -> StageResult:
        """Return the result of a block; an element that kills workers becomes an error in the result."""

        def run_rows(first: int) -> RowsDone:
            worker = self._running_worker(cancelled)
            try:
                results = self._rows_on(worker, spec, block, starts, first, cancelled)
                return RowsDone(results, worker.name, worker.exit_reason.read())
            finally:
                worker.kill()

        while True:
            try:
                return isolate(spec, block, starts, run_rows, self.failed_in_a_row)
            except LostResultError as error:  # a result in the block was lost with its node
                make_again(error.result)

    def _running_worker(self, cancelled: Callable[[], bool]) -> WorkerHandle:
        """Return a running worker. The caller kills it."""
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
        self,
        worker: WorkerHandle,
        spec: StageSpec,
        block: Block,
        starts: tuple[int, ...],
        first: int,
        cancelled: Callable[[], bool],
    ) -> list[StageResult]:
        """Return the results of single rows, from row `first` on, until the worker dies or no row is left."""
        digest, stage = self._pickle_of(spec)
        results: list[StageResult] = []
        # One at a time: a finished result may not have been sent when the next row ends the worker's process.
        for row in range(first, block.num_rows):
            one, places = block.slice(row, row + 1), tuple(start + row for start in starts)
            ref, stored = worker.run(digest, stage, one, places)
            if not wait_for(ref, self._element_s, cancelled, actor=worker.name):
                raise DeadlineExceededError(
                    f"Input worker {worker.name} must finish element {places[0]} of the input of stage {spec.name} "
                    f"within {self._element_s:g} s (Timeouts.element_s), and has not. The worker was killed. If the "
                    "function is only slow, raise the limit."
                )
            try:
                recipe = Recipe.of(self._pool, spec, one, places)
                results.append(with_row_ids(unpack_result(ray.get(ref)), stored, recipe, worker.node))
            except RayActorError:
                break
        return results
