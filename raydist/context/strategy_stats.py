"""What a strategy has done so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from raydist.parameter_servers.server_stats import ServerStats

__all__ = ["StrategyStats"]


@final
@dataclass(frozen=True, slots=True)
class StrategyStats:
    """What a strategy has done so far. Made by `strategy.stats()`; later versions may count more.

    Attributes:
        steps: Calls of `strategy.run`.
        nonfinite_backwards: Backward passes that brought NaN or infinities into the global gradients, in runs with
            `RunOptions(on_nonfinite="skip")` or `"raise"`; others do not look.
        skipped_updates: Calls of `optimizer.step()` that therefore changed nothing. One that a `GradScaler` leaves out
            by itself is no call.
        servers: What each parameter server has done: pulls, pushes, bytes, staleness; none under other strategies.

    >>> strategy = rd.OneDeviceStrategy("cpu")
    >>> strategy.run(lambda: None)
    >>> strategy.stats()
    StrategyStats(steps=1, nonfinite_backwards=0, skipped_updates=0, servers=())
    """

    steps: int = 0
    nonfinite_backwards: int = 0
    skipped_updates: int = 0
    servers: tuple[ServerStats, ...] = ()
