"""How far ahead of its readers a pass may be, and how much goes into one group. Pure.

The first groups are single steps. Once a reader has told its pace, so many steps go together as it takes in a tenth of
a second, while they are small: a group costs some milliseconds of all processes together, however few steps it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

__all__ = ["Credits"]

_GROUP_BYTES = 4 << 20  # of one replica; 8 MB were no faster, and no longer fit into caches
_GROUP_S = 0.1  # work for the reader in one group
_MOST_STEPS = 64  # in one group
_GROUPS = 3  # one in use, one ready, one being made


@final
@dataclass(frozen=True, slots=True)
class Credits:
    """What a pass may make before its readers are done with something.

    Attributes:
        capacity: Steps made and not done with, however large they are.
        num_replicas: Replicas that share a step.
        spare_bytes: What may be held in steps beyond `capacity`, while their reader is quick; 0 for none.
    """

    capacity: int
    num_replicas: int = 1
    spare_bytes: int = 0

    @classmethod
    def of_small_steps(cls, capacity: int, num_replicas: int, *, store_bytes: int | None) -> Credits:
        """Credits for more than `capacity` steps where they are small, in an object store of `store_bytes`."""
        wanted = _GROUPS * num_replicas * _GROUP_BYTES
        return cls(capacity, num_replicas, wanted if store_bytes is None else min(wanted, store_bytes // 8))

    @property
    def group_bytes(self) -> int:
        """Bytes of one replica's piece of a group, at most; a larger step goes alone."""
        spare = self.spare_bytes // (_GROUPS * self.num_replicas)
        return min(_GROUP_BYTES, spare) if self.spare_bytes else _GROUP_BYTES

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
