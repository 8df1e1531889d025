"""The consistency models of a parameter server strategy, which limit how far a worker may run ahead of others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from raydist.core.errors import InvalidArgumentError
from raydist.options.requirement import require


@final
@dataclass(frozen=True, slots=True)
class BoundedStaleness:
    """Stale synchronous parallel (SSP) training: no worker runs more than `max_clocks` closures ahead of the slowest.

    A worker's clock counts the closures that it has finished since the queue of closures was last empty. A worker
    begins a closure only if its clock is at most `max_clocks` ahead of the smallest clock of all living workers that
    have work. So a worker whose clock is c reads parameters that hold the updates of at least the first
    c - `max_clocks` closures of every other worker. With 0, no worker begins its next closure before all workers have
    finished their current one. A worker that starts later, or that restarts after its death, starts at the smallest
    clock.

    Args:
        max_clocks: Number of closures, >= 0.

    Raises:
        InvalidArgumentError: `max_clocks` is not an int >= 0.

    Source: none in tf.distribute; Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
    Server", 2013.

    >>> rd.BoundedStaleness(4).max_clocks
    4
    """

    max_clocks: int

    def __post_init__(self) -> None:
        require(_is_number(self.max_clocks), "BoundedStaleness must be given an int >= 0 (closures)", self.max_clocks)


@final
@dataclass(frozen=True, slots=True)
class SyncWithBackups:
    """Synchronous steps that apply the mean of the first N - `num_backups` gradients and drop later ones.

    N is the number of workers that hold a closure; a step waits for at least one gradient. `strategy.stats()` counts
    the dropped gradients.

    Args:
        num_backups: Number of workers whose gradients a step does not wait for.

    Raises:
        InvalidArgumentError: `num_backups` is not an int >= 0.

    Source: tf.compat.v1.train.SyncReplicasOptimizer (`replicas_to_aggregate`); Chen et al., "Revisiting Distributed
    Synchronous SGD", 2016.

    >>> rd.SyncWithBackups(1).num_backups
    1
    """

    num_backups: int

    def __post_init__(self) -> None:
        require(_is_number(self.num_backups), "SyncWithBackups must be given an int >= 0 (workers)", self.num_backups)


Consistency = Literal["async"] | BoundedStaleness | SyncWithBackups


def require_consistency(value: object) -> Consistency:
    """Return the value if it is a consistency model; raise InvalidArgumentError otherwise.

    >>> require_consistency("eventual")
    Traceback (most recent call last):
    raydist.core.errors.InvalidArgumentError: consistency must be "async", rd.BoundedStaleness(k) or ... got 'eventual'.
    """
    if value == "async":
        return "async"
    if isinstance(value, BoundedStaleness | SyncWithBackups):
        return value
    raise InvalidArgumentError(
        f'consistency must be "async", rd.BoundedStaleness(k) or rd.SyncWithBackups(num_backups), got {value!r}.'
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
