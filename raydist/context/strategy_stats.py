"""Counts of a strategy's steps and updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from raydist.parameter_servers.server_stats import ServerStats

__all__ = ["StrategyStats"]


@final
@dataclass(frozen=True, slots=True)
class StrategyStats:
    """Counts of a strategy so far, from `strategy.stats()`; later versions may count more.

    Attributes:
        steps: Number of calls of `strategy.run`.
        nonfinite_backwards: Number of backward passes with NaN or infinities in the global gradients, in runs with
            `RunOptions(on_nonfinite="skip")` or `"raise"`; other runs do not check.
        skipped_updates: Number of calls of `optimizer.step()` that therefore changed nothing. A step that a
            `GradScaler` leaves out is no such call.
        servers: Counts of each parameter server: pulls, pushes, bytes, staleness; empty under other strategies.

    >>> strategy = rd.OneDeviceStrategy("cpu")
    >>> strategy.run(lambda: None)
    >>> strategy.stats()
    StrategyStats(steps=1, nonfinite_backwards=0, skipped_updates=0, servers=())
    """

    steps: int = 0
    nonfinite_backwards: int = 0
    skipped_updates: int = 0
    servers: tuple[ServerStats, ...] = ()
