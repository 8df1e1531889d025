"""`rd.get_global_step`: how many batches were trained on."""

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

__all__ = ["counter_of", "get_global_step", "global_step_here", "step_counting"]


def get_global_step() -> torch.Tensor:
    """How many global batches the current strategy has trained on: a mirrored int64 scalar, made when first asked for.

    `Model.fit` adds 1 for each global batch; loops of your own add to it themselves, in the step or on the driver
    between steps. It is part of every checkpoint that is made in its strategy's scope, or that has a module of it, or
    where no other strategy is open, and the step of summaries that are given none.

    On the driver it reads the replicas' present value, which waits for dispatched steps; in a step it is the replica's
    own, as it is then. Under `ParameterServerStrategy` only the driver counts, closures that were applied: a closure
    sees what the driver read or wrote last, and what it adds is lost. Outside of every scope there is one for the
    process.

    Returns:
        The variable itself: `rd.get_global_step().add_(1)` counts, `int(rd.get_global_step())` reads.

    Raises:
        FailedPreconditionError: The strategy is closed; or a step asks for what the driver has never asked for.

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


def global_step_here() -> int:
    """The global step as a number; in a step it is 0 where the driver has never asked for it: nobody can have counted.

    >>> global_step_here() == int(get_global_step())
    True
    """
    return 0 if not _on_driver() and get_strategy()._find_counter() is None else int(get_global_step())


def counter_of(strategy: Strategy) -> StepCounter:
    """What counts the global steps of a strategy, made now if there is none."""
    return strategy._make_counter()


def step_counting(strategy: Strategy) -> Callable[[], Any]:
    """What a training step calls to be counted, where steps count for themselves."""
    return _Counting(counter_of(strategy)) if strategy._steps_count else _count_nothing


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Counting:
    """Adds 1 to the counter."""

    counter: StepCounter

    def __call__(self) -> None:
        self.counter.value.add_(1)


def _count_nothing() -> None:
    """The driver counts."""
