"""How far ahead of its readers a pass may be, and how much goes into one group. Pure.

The first groups are single steps. Once a reader has told its pace, so many steps go together as it takes in half
a second, while they are small: a group costs some milliseconds of all processes together, however few steps it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

__all__ = ["Credits"]

_GROUP_BYTES = 32 << 20  # of one replica; with 16 MB a step of 8 MB took 3.5 ms where it takes 2.8
_GROUP_S = 0.5  # work for the reader in one group
_MOST_STEPS = 128  # in one group
_GROUPS = 3  # one in use, one ready, one being made


@final
@dataclass(frozen=True, slots=True)
class Credits:
    """What a pass may make before its readers are done with something.

    Attributes:
        capacity: Steps made and not done with, however large they are.
        spare_bytes: What may be held in steps beyond `capacity`, while their reader is quick; 0 for none.
        group_bytes: Of one replica's piece of a group, at most; a larger step goes alone.
    """

    capacity: int
    spare_bytes: int = 0
    group_bytes: int = _GROUP_BYTES

    @classmethod
    def within(cls, store_bytes: int | None, capacity: int, num_replicas: int, *, only_capacity: bool) -> Credits:
        """Credits that leave most of an object store of `store_bytes` (None: not known) to others.

        Args:
            store_bytes: Its size.
            capacity: See the class.
            num_replicas: Replicas that share a step.
            only_capacity: No steps beyond `capacity`, however small they are.
        """
        spare = _GROUPS * num_replicas * _GROUP_BYTES
        if store_bytes is not None:
            spare = min(spare, store_bytes // 8)
        return cls(capacity, 0 if only_capacity else spare, spare // (_GROUPS * num_replicas))

    def group_steps(self, pace_s: float | None) -> int:
        """Steps in one group at most, for a reader that lately needed `pace_s` seconds for one (None: not known)."""
        few = max(1, self.capacity // 2)  # the reader holds one group while the next one is made
        if not self.spare_bytes or pace_s is None:
            return few
        return max(few, min(_MOST_STEPS, int(_GROUP_S / max(pace_s, 1e-6))))

    def allow(self, *, ahead: int, held_bytes: int, step_bytes: int, pace_s: float | None) -> bool:
        """Whether one more step may be made.

        Args:
            ahead: Steps made and not done with.
            held_bytes: Bytes of all that is held.
            step_bytes: Bytes of the last step.
            pace_s: See `group_steps`.
        """
        if ahead < self.capacity or not self.spare_bytes:
            return ahead < self.capacity
        quick = pace_s is not None and ahead < _GROUPS * self.group_steps(pace_s)
        return quick and held_bytes + step_bytes <= self.spare_bytes
