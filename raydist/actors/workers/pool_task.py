"""One block on a pool of input workers, with retries if the block's worker dies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, final

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from raydist.actors.supervision import first_line, wait_for
from raydist.actors.workers.mapped_columns import LostResultError
from raydist.actors.workers.result_recipes import Recipe, RunsBlocks, make_again
from raydist.actors.workers.stored_results import with_row_ids
from raydist.actors.workers.worker import unpack_result
from raydist.core.errors import DeadlineExceededError, UnavailableError
from raydist.core.exception_utils import annotate
from raydist.pipelines.elements.items import StageResult
from raydist.pipelines.engine.executor import Pending

if TYPE_CHECKING:
    from raydist.actors.workers.handle import WorkerHandle
    from raydist.pipelines.elements.blocks import Block
    from raydist.pipelines.engine.kernel import StageSpec


@final
@dataclass(frozen=True, slots=True)
class Sending:
    """A block that was sent to a worker.

    Attributes:
        worker: The worker.
        ref: The reference to the answer.
        stored: The reference to the result's stored columns.
        limit_s: Limit for the result in seconds.
    """

    worker: WorkerHandle
    ref: Any
    stored: Any
    limit_s: float


class PoolOfTask(RunsBlocks, Protocol):
    """The interface of a pool that a task uses."""

    @property
    def closed(self) -> bool:
        """Return True once the pool is closed; waiting tasks then stop."""

    def send(self, spec: StageSpec, block: Block, starts: tuple[int, ...], node: str = "") -> Sending:
        """Send a block to a worker, on Ray node `node` if one runs there."""

    def received(self) -> None:
        """Record that the result of a block has arrived."""

    def replace(self, worker: WorkerHandle, error: RayActorError) -> Any:
        """Replace a dead worker; return the result reference of the block on which the worker died, or None."""

    def give_up(self, worker: WorkerHandle) -> None:
        """Kill a worker that is stuck."""

    def run_alone(self, task: PoolTask, cancelled: Callable[[], bool]) -> StageResult:
        """Run a block on which a worker died row by row and return the result."""


@final
class PoolTask(Pending):
    """A block and the worker that runs it. The constructor sends the block."""

    def __init__(
        self, pool: PoolOfTask, spec: StageSpec, block: Block, starts: tuple[int, ...], node: str = ""
    ) -> None:
        self.spec = spec
        self.block = block
        self.starts = starts
        self.pool = pool
        self._cancelled = False
        self._deaths = 0
        self._sent = pool.send(spec, block, starts, node)

    def cancel(self) -> None:
        """Make every present and later wait for the result raise CancelledError."""
        self._cancelled = True

    def _is_cancelled(self) -> bool:
        return self._cancelled or self.pool.closed

    def done(self) -> bool:
        if not self._sent.worker.reachable:
            return True  # with an error
        return bool(ray.wait([self._sent.ref], timeout=0, fetch_local=False)[0])

    def result(self) -> StageResult:
        while True:
            try:
                self._sent.worker.await_start(self._is_cancelled)
                return self._receive()
            except RayTaskError as error:  # the worker could not send the result
                raise self._cause_of(error) from None
            except RayActorError as error:
                if self._was_at_work(error):
                    return self.pool.run_alone(self, self._is_cancelled)
                self._sent = self.pool.send(self.spec, self.block, self.starts)  # the worker had not begun this block
            except LostResultError as error:  # of an earlier stage: the block in this task gets the new reference
                make_again(error.result)
                self._sent = self.pool.send(self.spec, self.block, self.starts)
            except ObjectLostError:  # the answer was lost with its node
                self._sent = self.pool.send(self.spec, self.block, self.starts)
            except RayError as error:  # the result does not fit into the object store
                raise UnavailableError(
                    f"A block of stage {self.spec.name} that input worker {self._sent.worker.name} made cannot be had: "
                    f"{first_line(error)} Iterate again, or load the last saved state.",
                    actor=self._sent.worker.name,
                ) from error

    def _was_at_work(self, error: RayActorError) -> bool:
        """Replace the dead worker; return True if this block may have killed it."""
        worker = self._sent.worker
        block_at_work = self.pool.replace(worker, error)
        if not worker.started:
            return False
        self._deaths += 1
        return block_at_work is self._sent.ref or self._deaths > 1

    def _receive(self) -> StageResult:
        if not wait_for(self._sent.ref, self._sent.limit_s, self._is_cancelled, actor=self._sent.worker.name):
            self.pool.give_up(self._sent.worker)
            raise self._late()
        result = unpack_result(ray.get(self._sent.ref, timeout=self._sent.limit_s))
        self.pool.received()
        recipe = Recipe.of(self.pool, self.spec, self.block, self.starts)
        return with_row_ids(result, self._sent.stored, recipe, self._sent.worker.node)

    def _late(self) -> DeadlineExceededError:
        labels = ", ".join(kernel.label for kernel in self.spec.kernels)
        first, last = self.starts[0], self.starts[0] + self.block.num_rows - 1
        which = f"element {first}" if first == last else f"one of the elements {first} to {last}"
        return DeadlineExceededError(
            f"Input worker {self._sent.worker.name} must finish a block of stage {self.spec.name} within "
            f"{self._sent.limit_s:g} s (Timeouts.element_s, for each block in its queue), and has not: {labels} may be "
            f"stuck at {which} of its input. The worker was killed. If the function is only slow, raise the limit."
        )

    def _cause_of(self, error: RayTaskError) -> Exception:
        cause = error.cause if isinstance(error.cause, Exception) else error
        annotate(cause, f"In {self._sent.worker.name}, sending the result of stage {self.spec.name}.")
        return cause
