"""How the driver hands steps to the replicas: one batch a call, or several steps a call, looping in the replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, final

from raydist.preemption.boundaries import undivided_run
from raydist.training.steps import Step, looped

if TYPE_CHECKING:
    from raydist.context.strategy import Strategy
    from raydist.options import RunOptions

__all__ = ["Executions", "executions"]

_END = object()


class Executions(ABC):
    """Calls to the replicas over one iterator, each of one or more steps.

    `ready()`, then `execute(limit)`, and so on; `ready` tells beforehand whether there is anything to execute.
    """

    result: Any = None
    """What the step function returned in the last execution (from single steps only)."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether another execution makes sense: False at the end of the data."""

    @abstractmethod
    def execute(self, limit: int | None) -> int:
        """Run at most `limit` steps (None: as many as one execution has) and return how many there were."""


def executions(
    strategy: Strategy,
    step: Step,
    iterator: Iterator[Any],
    *,
    steps_per_execution: int = 1,
    num_batches: int | None = None,
    options: RunOptions | None = None,
) -> Executions:
    """The calls that run `step` on every batch of `iterator`, of which there are `num_batches` if that is known."""
    if steps_per_execution == 1:
        return _SingleSteps(strategy, step, iterator, options)
    return _Loops(strategy, step, iterator, options, size=steps_per_execution, left=num_batches)


@final
class _SingleSteps(Executions):
    """The driver draws each batch (references only) and dispatches its step without waiting for the last one."""

    def __init__(self, strategy: Strategy, step: Step, iterator: Iterator[Any], options: RunOptions | None) -> None:
        self._strategy = strategy
        self._step = step
        self._iterator = iterator
        self._options = options
        self._batch: Any = _END

    def ready(self) -> bool:
        if self._batch is _END:
            self._batch = next(self._iterator, _END)
        return self._batch is not _END

    def execute(self, limit: int | None) -> int:
        batch, self._batch = self._batch, _END
        self.result = self._strategy.run(self._step, args=(batch,), options=self._options)
        return 1


@final
class _Loops(Executions):
    """The replicas draw the batches; the driver learns how many there were from their result."""

    def __init__(
        self,
        strategy: Strategy,
        step: Step,
        iterator: Iterator[Any],
        options: RunOptions | None,
        *,
        size: int,
        left: int | None,
    ) -> None:
        self._strategy = strategy
        self._loop = looped(step)
        self._iterator = iterator
        self._options = options
        self._size = size
        self._left = left  # batches to come; None: unknown, until an execution came back short

    def ready(self) -> bool:
        return self._left != 0

    def execute(self, limit: int | None) -> int:
        count = self._size if limit is None else min(limit, self._size)
        with undivided_run():  # a `fit` counts by executions
            counts = self._strategy.run(self._loop, args=(self._iterator, count), options=self._options)
        # Batches exist on all replicas or on none, so that every replica counts the same.
        done = int(self._strategy.local_results(counts)[0])
        if done < count:
            self._left = 0
        elif self._left is not None:
            self._left -= done
        return done
