"""The part of a strategy that its distributed datasets use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from raydist.core.errors import InvalidArgumentError

if TYPE_CHECKING:
    from raydist.actors.readers.driver_iterator import EpochOpener
    from raydist.options import Timeouts


@final
@dataclass(frozen=True, slots=True)
class InputSide:
    """The part of a strategy that its distributed datasets use.

    Attributes:
        opener: Starts passes: the strategy's `InputHost`.
        num_replicas: Number of replicas, equal for all workers; the replicas of a worker have consecutive ranks.
        timeouts: Time limits.
        drain: Blocks until every dispatched step is done (the replicas may be reading an iterator).
        num_workers: Number of workers (nodes) of the replicas.
    """

    opener: EpochOpener
    num_replicas: int
    timeouts: Timeouts
    drain: Callable[[], None]
    num_workers: int = 1

    @property
    def replicas_per_worker(self) -> int:
        """Number of replicas of each worker.

        Raises:
            InvalidArgumentError: The workers have different numbers of replicas.
        """
        size, rest = divmod(self.num_replicas, self.num_workers)
        if rest:
            raise InvalidArgumentError(
                f"Workers that read their own data must have equally many replicas, got {self.num_replicas} replicas "
                f"on {self.num_workers} workers. Use AutoShardPolicy.DATA, or as many devices on every worker."
            )
        return size
