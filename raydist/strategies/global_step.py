"""`rd.get_global_step`: the number of batches that were trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch

from raydist.context.current import has_strategy, in_cross_replica_context
from raydist.context.step_counter import StepCounter
from raydist.context.strategy import Strategy
from raydist.errors import FailedPreconditionError
from raydist.strategies.default import get_strategy

__all__ = ["counter_of", "get_global_step", "step_counting"]


def get_global_step() -> torch.Tensor:
    """Return the number of global batches trained on: a mirrored int64 scalar, created by the first call.

    `Model.fit` adds 1 for each global batch; your own loops add to the variable in the step or on the driver between
    steps. A checkpoint contains it if it is made in the strategy's scope, has a module of the strategy, or no other
    strategy is open. It is also the default step of summaries.

    On the driver, reading the variable waits for dispatched steps; in a step it is the replica's own present value.
    Under `ParameterServerStrategy` only the driver counts, closures that were applied: a closure sees the value that
    the driver read or wrote last, and additions in a closure are lost. Outside of every scope there is one variable for
    the process.

    Returns:
        The variable itself: `rd.get_global_step().add_(1)` counts, `int(rd.get_global_step())` reads.

    Raises:
        FailedPreconditionError: The strategy is closed; or a step calls this before the driver ever did.

    Source: tf.compat.v1.train.get_or_create_global_step.

    >>> strategy = rd.OneDeviceStrategy("cpu")
    >>> with strategy.scope():
    ...     step = rd.get_global_step()
    >>> for batch in strategy.distribute_dataset(rd.Dataset.range(5).batch(2)):
    ...     _ = strategy.run(lambda batch: rd.get_global_step().add_(1), args=(batch,))
    >>> int(step)
    3
    """
    strategy = get_strategy()
    if _on_driver():
        return counter_of(strategy).value
    found = strategy._find_counter()
    if found is None:
        raise FailedPreconditionError(
            "The global step must be made by the driver, so that all replicas have the same, got a step that asks for "
            "it first. Call rd.get_global_step() under the scope, before that step runs."
        )
    return found.value


def _on_driver() -> bool:
    return not has_strategy() or in_cross_replica_context()


def counter_of(strategy: Strategy) -> StepCounter:
    """Return the global step counter of a strategy, created now if there is none."""
    return strategy._make_counter()


def step_counting(strategy: Strategy) -> Callable[[], Any]:
    """Return the function by which a training step counts itself, if steps do."""
    return _Counting(counter_of(strategy)) if strategy._steps_count else _count_nothing


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Counting:
    """A function that adds 1 to the counter."""

    counter: StepCounter

    def __call__(self) -> None:
        self.counter.value.add_(1)


def _count_nothing() -> None:
    """Do nothing: the driver counts."""
