"""Group size and window of steps in flight, from the measured costs of steps. Does no I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

__all__ = ["Pace"]

_GROUP_S = 0.1  # short enough that an error or result of the group's first step is hardly delayed
# Cost of an actor call for replica and driver: 8 steps of 45 ms in one call take 7 % less than in calls of one or two
# (two nodes of one replica). Long steps share a message if it would cost more than this fraction of a step.
_MESSAGE_S = 2e-3
_MESSAGE_SHARE = 0.01
_LONGEST_GROUP_S = 1.4  # approximate limit: 6 steps of slightly more than 0.2 s
# With groups of at least this length, only one group waits behind the running one.
_LONG_GROUP_S = 0.5
# Fraction of a step for which idle replicas may wait for more steps; waits below 1 ms would collect none.
_LINGER_SHARE = 0.01
_LEAST_LINGER_S = 1e-3
_MOST_STEPS = 16  # more would save little: a message takes 1.3 ms of CPU in all for two replicas
_MOST_BYTES = 64 << 10  # of results in one message: reading the first result fetches, and keeps, all of them
_WINDOW = 8  # steps in flight: enough to hide the dispatch, few enough to bound the queues
# Fewer long steps: a save waits for them, and a preempted job has 3 s (`ray job stop`).
_WINDOW_S = 1.0
_SHORTEST_WINDOW = 3
_REMEMBERED = 256  # number of functions


@final
@dataclass(frozen=True, slots=True)
class _Cost:
    seconds: float
    num_bytes: int


@final
@dataclass(frozen=True, slots=True)
class _Advice:
    """Group size, wait and window for steps of some functions; see `Pace`."""

    group_size: int
    linger_s: float
    window: int


@final
class Pace:
    """Measured costs of steps, by a key of their function. Steps of unknown functions are sent alone.

    Args:
        num_replicas: Number of replicas that each step is sent to.

    >>> pace = Pace()
    >>> pace.group_size([b"f"])
    1
    >>> pace.learn(b"f", seconds=0.02, num_bytes=8)
    >>> pace.group_size([b"f"]), pace.window([b"f"])
    (10, 30)
    """

    def __init__(self, num_replicas: int = 1) -> None:
        self._messages_s = num_replicas * _MESSAGE_S
        self._costs: dict[bytes, _Cost] = {}
        self._advice: dict[frozenset[bytes], _Advice] = {}  # a computation takes 4 us, and there are many calls

    def learn(self, key: bytes, *, seconds: float, num_bytes: int) -> None:
        """Record the cost of a step.

        Args:
            key: Key of the function; an empty key is ignored.
            seconds: Duration of the step.
            num_bytes: Size of the step's result.
        """
        if not key:
            return
        self._advice.clear()
        self._costs.pop(key, None)
        self._costs[key] = _Cost(seconds, num_bytes)
        while len(self._costs) > _REMEMBERED:
            del self._costs[next(iter(self._costs))]

    def group_size(self, keys: Sequence[bytes]) -> int:
        """Return how many steps that alternate between the functions of `keys` may share a message; at least 1."""
        return self._on(keys).group_size

    def linger_s(self, keys: Sequence[bytes]) -> float:
        """Return how long steps may wait for further steps although replicas are idle; mostly 0."""
        return self._on(keys).linger_s

    def window(self, keys: Sequence[bytes]) -> int:
        """Return how many steps may be in flight: one running group, one waiting group, and one that is collected.

        Long groups: only the first two, because a save waits for all of them, some 3 s at most.
        """
        return self._on(keys).window

    def _on(self, keys: Sequence[bytes]) -> _Advice:
        functions = frozenset(keys)
        advice = self._advice.get(functions)
        if advice is None:
            advice = self._advice[functions] = self._new_advice([self._costs.get(key) for key in functions])
        return advice

    def _new_advice(self, costs: Sequence[_Cost | None]) -> _Advice:
        group_size = self._group_size(costs)
        slowest = max((cost.seconds if cost else 0.0 for cost in costs), default=0.0)
        in_time = math.ceil(_WINDOW_S / max(slowest, _WINDOW_S / _WINDOW))
        linger_s = self._linger_s(costs) if group_size > 1 else 0.0
        groups = 3 if group_size * slowest < _LONG_GROUP_S else 2
        return _Advice(group_size, linger_s, max(in_time, _SHORTEST_WINDOW, groups * group_size))

    def _group_size(self, costs: Sequence[_Cost | None]) -> int:
        slowest = max((cost.seconds if cost else _GROUP_S for cost in costs), default=_GROUP_S)
        largest = max((cost.num_bytes if cost else _MOST_BYTES for cost in costs), default=_MOST_BYTES)
        slowest = max(slowest, 1e-9)
        by_time = max(int(_GROUP_S / slowest), self._to_save_messages(slowest))
        by_bytes = _MOST_BYTES // max(largest, 1)
        return max(1, min(by_time, by_bytes, _MOST_STEPS))

    def _to_save_messages(self, seconds: float) -> int:
        """Return how many steps of so many seconds must share a message to keep its cost a small fraction."""
        return min(int(self._messages_s / (_MESSAGE_SHARE * seconds)), round(_LONGEST_GROUP_S / seconds))

    def _linger_s(self, costs: Sequence[_Cost | None]) -> float:
        if not self._messages_s:
            return 0.0
        quickest = min((cost.seconds if cost else 0.0 for cost in costs), default=0.0)
        linger_s = _LINGER_SHARE * quickest
        return linger_s if linger_s >= _LEAST_LINGER_S else 0.0
