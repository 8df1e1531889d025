"""The loop over the batches of an epoch, a validation or a prediction on the driver, with callbacks around each call.

An *execution* is one call to the replicas, of `steps_per_execution` steps.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, final

from torch import nn

from raydist.cluster.preemption import ignore_draws
from raydist.core.errors import InvalidArgumentError
from raydist.core.values import INFINITE_CARDINALITY
from raydist.distributed_dataset import DistributedDataset
from raydist.training.steps import Step, looped

if TYPE_CHECKING:
    from raydist.context.strategy import Strategy
    from raydist.options import RunOptions


def run_executions(
    calls: Executions,
    *,
    begin: Callable[[int], None],
    end: Callable[[int], None],
    limit: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
    start: int = 0,
) -> int:
    """Execute until `limit` steps, the end of the data or `stopped()`; return the number of steps done.

    `begin` is called with the index of the next step before each execution, `end` with the number of steps done after
    it. Both count on from `start`.
    """
    done = start
    while (limit is None or done < limit) and not stopped() and calls.ready():
        begin(done)
        steps = calls.execute(None if limit is None else limit - done)
        if steps == 0:
            break
        done += steps
        end(done)
    return done


@contextlib.contextmanager
def opened(data: DistributedDataset) -> Iterator[Iterator[Any]]:
    """Open an iterator over `data`, and close it at the end of the `with` block."""
    iterator: Any = iter(data)
    try:
        yield iterator
    finally:
        iterator.close()


def num_batches(data: DistributedDataset) -> int | None:
    """Return the number of batches of one iteration over the data, if known."""
    known = data.cardinality()
    return known if known >= 0 else None


def num_steps(data: DistributedDataset, limit: int | None) -> int | None:
    """Return the number of steps of an iteration over at most `limit` batches, if known."""
    known = num_batches(data)
    return known if limit is None or (known is not None and known < limit) else limit


def warn_out_of_data(name: str, wanted: int, steps: int, then: str) -> None:
    """Warn once, at the user's line, that data ended before the number of steps requested by argument `name`."""
    level = 1
    while sys._getframe(level).f_globals.get("__name__", "").startswith("raydist."):
        level += 1
    warnings.warn(
        f"The dataset ran out of batches: {name}={wanted}, but only {steps} were left {then} "
        f"Leave {name} out for whole passes, or add .repeat() to the dataset.",
        stacklevel=level + 1,
    )


def require_at_least(name: str, value: int | None, least: int = 1) -> None:
    """Raise InvalidArgumentError unless `value` is a number >= `least`, or None."""
    if value is not None and value < least:
        raise InvalidArgumentError(f"{name} must be >= {least}, got {value!r}.")


def require_finite(data: DistributedDataset, what: str, steps: int | None = None) -> None:
    """Raise InvalidArgumentError for an infinite dataset without a number of steps."""
    if steps is None and data.cardinality() == INFINITE_CARDINALITY:
        raise InvalidArgumentError(f"{what} needs a dataset that ends, got an infinite one. Add .take(num_batches).")


def require_steps(steps: int, what: str) -> None:
    """Raise InvalidArgumentError for a dataset without batches."""
    if steps == 0:
        raise InvalidArgumentError(
            f"The dataset for {what} must have at least one batch, got none. "
            "Check its filters, take / skip, drop_remainder, and that its files are not empty."
        )


@contextlib.contextmanager
def in_evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put the module into evaluation mode for the `with` block; then restore every submodule's training flag."""
    flags = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, flag in flags:
            part.training = flag


_END = object()


@final
class Executions:
    """Calls to the replicas over one iterator, of one or more steps each. Call `ready` before each `execute`.

    With single steps the driver draws each batch (references only) and dispatches the step without waiting. Otherwise
    the replicas draw the batches and return their number to the driver.

    Attributes:
        result: Result of the step function in the last execution (single steps only).
    """

    def __init__(
        self,
        strategy: Strategy,
        step: Step,
        iterator: Iterator[Any],
        *,
        steps_per_execution: int = 1,
        num_batches: int | None = None,
        options: RunOptions | None = None,
    ) -> None:
        self.result: Any = None
        self._strategy = strategy
        self._size = steps_per_execution
        self._call: Callable[..., Any] = step if self._size == 1 else looped(step)
        self._iterator = iterator
        self._options = options
        self._left = num_batches  # None: unknown, until an execution returns fewer than asked
        self._batch: Any = _END

    def ready(self) -> bool:
        """Return False at the end of the data. May draw a batch."""
        if self._size > 1:
            return self._left != 0
        if self._batch is _END:
            self._batch = next(self._iterator, _END)
        return self._batch is not _END

    def execute(self, limit: int | None) -> int:
        """Run at most `limit` steps (None: as many as one execution has) and return the number of steps run."""
        if self._size == 1:
            batch, self._batch = self._batch, _END
            self.result = self._strategy.run(self._call, args=(batch,), options=self._options)
            return 1
        count = self._size if limit is None else min(limit, self._size)
        with ignore_draws():  # `fit` counts by executions
            counts = self._strategy.run(self._call, args=(self._iterator, count), options=self._options)
        # A batch exists on all replicas or on none, so every replica returns the same count.
        done = int(self._strategy.local_results(counts)[0])
        if done < count:
            self._left = 0
        elif self._left is not None:
            self._left -= done
        return done
