"""All time limits."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import final

from raydist.options.requirement import require


@final
@dataclass(frozen=True, slots=True)
class Timeouts:
    """The limit of every wait, in seconds. No wait of raydist is longer than one of these.

    Attributes:
        start_s: Until Ray is up and every actor is placed and answers.
        collective_s: One collective: the time that ranks wait for the slowest one, including its computation.
        step_s: One dispatched step, from its dispatch to its result, including queueing.
        input_s: The next element from an input pipeline.
        element_s: A user's function on one block, in a pool of input workers; a stuck worker is then killed.
        close_s: Until everything has stopped on close; processes that still live are then killed.
        idle_s: An unused pool of input workers, before its workers stop and release their resources.
        poll_s: One long poll between actors; only a longer limit above ends a wait.

    Raises:
        InvalidArgumentError: A limit is not a finite number > 0.

    >>> Timeouts(step_s=60).step_s
    60
    """

    start_s: float = 120.0
    collective_s: float = 300.0
    step_s: float = 3600.0
    input_s: float = 600.0
    element_s: float = 600.0
    close_s: float = 10.0
    idle_s: float = 60.0
    poll_s: float = 5.0

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            require(
                isinstance(value, int | float) and 0 < value < float("inf"),
                f"Timeouts.{limit.name} must be a finite number of seconds > 0",
                value,
            )
