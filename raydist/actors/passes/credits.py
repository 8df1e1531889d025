"""Limits for how far a pass may run ahead of its readers, and for the size of a group. Pure functions.

The first groups are single steps. Once a reader has reported its pace, a group holds the steps of half a second, if
they are small: a group costs some milliseconds of all processes together, however few steps it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

__all__ = ["Credits"]

_GROUP_BYTES = 32 << 20  # of one replica; with 16 MB, a step of 8 MB took 3.5 ms instead of 2.8
_GROUP_S = 0.5  # work for the reader in one group
_MOST_STEPS = 128  # in one group
_GROUPS = 3  # one in use, one ready, one being made


@final
@dataclass(frozen=True, slots=True)
class Credits:
    """The limits for the unacknowledged steps of a pass.

    Attributes:
        capacity: Number of unacknowledged steps that are always allowed, however large.
        spare_bytes: Limit in bytes for steps beyond `capacity`, while readers are fast; 0 for no such steps.
        group_bytes: Limit for one replica's piece of a group; a larger step gets its own group.
    """

    capacity: int
    spare_bytes: int = 0
    group_bytes: int = _GROUP_BYTES

    @classmethod
    def within(cls, store_bytes: int | None, capacity: int, num_replicas: int, *, only_capacity: bool) -> Credits:
        """Return credits that use at most an eighth of an object store for steps beyond `capacity`.

        Args:
            store_bytes: Size of the object store; None if unknown.
            capacity: See the class.
            num_replicas: Number of replicas that share a step.
            only_capacity: True to allow no steps beyond `capacity`.
        """
        spare = _GROUPS * num_replicas * _GROUP_BYTES
        if store_bytes is not None:
            spare = min(spare, store_bytes // 8)
        return cls(capacity, 0 if only_capacity else spare, spare // (_GROUPS * num_replicas))

    def group_steps(self, pace_s: float | None) -> int:
        """Return the most steps in one group, for a reader that takes `pace_s` seconds per step (None: unknown)."""
        few = max(1, self.capacity // 2)  # the reader holds one group while the next one is made
        if not self.spare_bytes or pace_s is None:
            return few
        return max(few, min(_MOST_STEPS, int(_GROUP_S / max(pace_s, 1e-6))))

    def allow(self, *, ahead: int, held_bytes: int, step_bytes: int, pace_s: float | None) -> bool:
        """Return True if the pass may make one more step.

        Args:
            ahead: Number of unacknowledged steps.
            held_bytes: Bytes of all kept steps.
            step_bytes: Bytes of the last step.
            pace_s: See `group_steps`.
        """
        if ahead < self.capacity or not self.spare_bytes:
            return ahead < self.capacity
        quick = pace_s is not None and ahead < _GROUPS * self.group_steps(pace_s)
        return quick and held_bytes + step_bytes <= self.spare_bytes
