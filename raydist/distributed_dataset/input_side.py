"""What a strategy gives to the datasets it distributes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from raydist.errors import InvalidArgumentError

if TYPE_CHECKING:
    from raydist.actors.readers.driver_pass import PassOpener
    from raydist.options import Timeouts

__all__ = ["InputSide"]


@final
@dataclass(frozen=True, slots=True)
class InputSide:
    """What a strategy gives to the datasets it distributes.

    Attributes:
        opener: Starts passes: the strategy's `InputHost`.
        num_replicas: Number of replicas, as many of each worker; those of a worker follow each other.
        timeouts: Limits.
        drain: Waits until every dispatched step is done (the replicas may be reading an iterator).
        num_workers: Workers (nodes) that the replicas belong to.
    """

    opener: PassOpener
    num_replicas: int
    timeouts: Timeouts
    drain: Callable[[], None]
    num_workers: int = 1

    @property
    def replicas_per_worker(self) -> int:
        """Replicas of each worker.

        Raises:
            InvalidArgumentError: The workers have not equally many.
        """
        size, rest = divmod(self.num_replicas, self.num_workers)
        if rest:
            raise InvalidArgumentError(
                f"Workers that read their own data must have equally many replicas, got {self.num_replicas} replicas "
                f"on {self.num_workers} workers. Use AutoShardPolicy.DATA, or as many devices on every worker."
            )
        return size
