"""How many steps to send together, and how far ahead of the replicas: from what steps took so far. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

__all__ = ["Pace"]

_GROUP_S = 0.1  # a group is over so soon that an error, or a result, of its first step is hardly told later
# What an actor call costs a replica and the driver: 8 steps of 45 ms that share one take 7 % less than one or two do
# (two nodes of one replica). Of longer steps, one message for several is sent where it would take more than this share.
_MESSAGE_S = 2e-3
_MESSAGE_SHARE = 0.01
_LONGEST_GROUP_S = 1.4  # about: of steps of 0.2 s and a bit, six
# Of groups that are as long as this, the next one is gathered while the last one that was sent begins.
_LONG_GROUP_S = 0.5
# Of a step, that replicas without work may be kept waiting for more steps; less than a ms would gather none.
_LINGER_SHARE = 0.01
_LEAST_LINGER_S = 1e-3
_MOST_STEPS = 16  # beyond this a message costs a step little: 1.3 ms of CPU in all for two replicas
_MOST_BYTES = 64 << 10  # of results in one message: the first that is read brings all of them, and holds them
_WINDOW = 8  # steps ahead: enough to hide the dispatch, few enough to bound what waits in queues
# Of long steps fewer: a save waits for them, and who is told to leave has 3 s (`ray job stop`).
_WINDOW_S = 1.0
_SHORTEST_WINDOW = 3
_REMEMBERED = 256  # functions


@final
@dataclass(frozen=True, slots=True)
class _Cost:
    seconds: float
    num_bytes: int


@final
@dataclass(frozen=True, slots=True)
class _Advice:
    """What is to be done with steps of some functions, see `Pace`."""

    group_size: int
    linger_s: float
    window: int


@final
class Pace:
    """Remembers what the steps of each function cost, by a key of the function. Steps of an unknown one go alone.

    Args:
        num_replicas: That a step is sent to.

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
        self._advice: dict[frozenset[bytes], _Advice] = {}  # 4 us to work out, and asked for often

    def learn(self, key: bytes, *, seconds: float, num_bytes: int) -> None:
        """Take note of a step.

        Args:
            key: Of its function; an empty one names none.
            seconds: That it took.
            num_bytes: Of its result.
        """
        if not key:
            return
        self._advice.clear()
        self._costs.pop(key, None)
        self._costs[key] = _Cost(seconds, num_bytes)
        while len(self._costs) > _REMEMBERED:
            del self._costs[next(iter(self._costs))]

    def group_size(self, keys: Sequence[bytes]) -> int:
        """How many steps may travel together, where they alternate between the functions of `keys`; at least 1."""
        return self._on(keys).group_size

    def linger_s(self, keys: Sequence[bytes]) -> float:
        """How long steps may wait for others that will travel with them, though replicas could begin; mostly 0."""
        return self._on(keys).linger_s

    def window(self, keys: Sequence[bytes]) -> int:
        """How many steps may be under way: one group that runs, one that waits, and one that is gathered.

        Of long ones only the first two: a save waits for all of them, some 3 s at most.
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
        """How many steps of so many seconds share their messages, that these are a small part of them."""
        return min(int(self._messages_s / (_MESSAGE_SHARE * seconds)), round(_LONGEST_GROUP_S / seconds))

    def _linger_s(self, costs: Sequence[_Cost | None]) -> float:
        if not self._messages_s:
            return 0.0
        quickest = min((cost.seconds if cost else 0.0 for cost in costs), default=0.0)
        linger_s = _LINGER_SHARE * quickest
        return linger_s if linger_s >= _LEAST_LINGER_S else 0.0
