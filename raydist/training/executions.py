"""Dispatch of steps to the replicas: one batch per call, or several steps per call in a loop on the replicas."""

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
    """Calls to the replicas over one iterator, of one or more steps each.

    Call `ready` before each `execute`: `ready` returns False at the end of the data.
    """

    result: Any = None
    """Result of the step function in the last execution (single steps only)."""

    @abstractmethod
    def ready(self) -> bool:
        """Return False at the end of the data. May draw a batch."""

    @abstractmethod
    def execute(self, limit: int | None) -> int:
        """Run at most `limit` steps (None: as many as one execution has) and return the number of steps run."""


def executions(
    strategy: Strategy,
    step: Step,
    iterator: Iterator[Any],
    *,
    steps_per_execution: int = 1,
    num_batches: int | None = None,
    options: RunOptions | None = None,
) -> Executions:
    """Return the calls that run `step` on every batch of `iterator`; `num_batches` is their number, if known."""
    if steps_per_execution == 1:
        return _SingleSteps(strategy, step, iterator, options)
    return _Loops(strategy, step, iterator, options, size=steps_per_execution, left=num_batches)


@final
class _SingleSteps(Executions):
    """Single steps: the driver draws each batch (references only) and dispatches the step without waiting."""

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
    """Loops of steps: the replicas draw the batches and return their number to the driver."""

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
        self._left = left  # batches to come; None: unknown, until an execution returns fewer than asked

    def ready(self) -> bool:
        return self._left != 0

    def execute(self, limit: int | None) -> int:
        count = self._size if limit is None else min(limit, self._size)
        with undivided_run():  # `fit` counts by executions
            counts = self._strategy.run(self._loop, args=(self._iterator, count), options=self._options)
        # A batch exists on all replicas or on none, so every replica returns the same count.
        done = int(self._strategy.local_results(counts)[0])
        if done < count:
            self._left = 0
        elif self._left is not None:
            self._left -= done
        return done
