"""The number of steps in one message to the replicas, and of steps in flight, from measured costs. Does no I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

_GROUP_S = 0.2  # short enough that an error or result of the group's first step is hardly delayed
MOST_STEPS = 16  # more would save little: a message takes 1.3 ms of CPU in all for two replicas
_MOST_BYTES = 64 << 10  # of results in one message: reading the first result fetches, and keeps, all of them
_WINDOW = 8  # steps in flight: enough to hide the dispatch, few enough to bound the queues
# Fewer long steps: a save waits for them, and a preempted job has 3 s (`ray job stop`).
_WINDOW_S = 1.0
_SHORTEST_WINDOW = 3
_REMEMBERED = 256  # number of functions


@final
class BatchingPolicy:
    """Measured costs of steps, by a key of their function. Steps of unknown functions are sent alone.

    >>> policy = BatchingPolicy()
    >>> policy.group_size([b"f"])
    1
    >>> policy.learn(b"f", seconds=0.02, num_bytes=8)
    >>> policy.group_size([b"f"]), policy.window([b"f"])
    (10, 30)
    """

    def __init__(self) -> None:
        self._costs: dict[bytes, tuple[float, int]] = {}

    def learn(self, key: bytes, *, seconds: float, num_bytes: int) -> None:
        """Record the duration and the result size of a step; an empty key is ignored."""
        if key:
            self._costs.pop(key, None)
            self._costs[key] = max(seconds, 1e-9), max(num_bytes, 1)
            if len(self._costs) > _REMEMBERED:
                del self._costs[next(iter(self._costs))]

    def group_size(self, keys: Sequence[bytes]) -> int:
        """Return how many steps that alternate between the functions of `keys` may share a message; at least 1."""
        costs = [self._costs.get(key, (_GROUP_S, _MOST_BYTES)) for key in set(keys)]
        limits = (min(int(_GROUP_S / seconds), _MOST_BYTES // num_bytes) for seconds, num_bytes in costs)
        return max(1, min(MOST_STEPS, *limits)) if costs else 1

    def window(self, keys: Sequence[bytes]) -> int:
        """Return how many steps may be in flight: one running group, one waiting group, and one that is collected."""
        slowest = max((self._costs[key][0] for key in set(keys) if key in self._costs), default=0.0)
        in_time = math.ceil(_WINDOW_S / max(slowest, _WINDOW_S / _WINDOW))
        return max(in_time, _SHORTEST_WINDOW, 3 * self.group_size(keys))
