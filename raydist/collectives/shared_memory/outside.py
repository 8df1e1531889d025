"""What of a group is not in the segment: nothing where all of its ranks share it, the other hosts where they do not."""

from __future__ import annotations

from collections.abc import Sequence

from raydist.collectives.base import Membership
from raydist.collectives.shared_memory.task import Condition, Task
from raydist.errors import RaydistError

__all__ = ["Outside"]


class Outside:
    """As a rank sees it where nothing is outside.

    Args:
        membership: The rank's place in the whole group.
        ranks: The ranks that share the segment, in their order there.

    Attributes:
        membership: As given.
        ranks: As given.
        calls_the_roll: Whether it can find out who is absent.
        is_empty: Whether nothing is outside: then nobody needs to ask.
    """

    calls_the_roll = False
    is_empty = True

    def __init__(self, membership: Membership, ranks: Sequence[int]) -> None:
        self.membership = membership
        self.ranks = tuple(ranks)

    @property
    def num_under_way(self) -> int:
        """Messages of this rank to or from there, beside what tasks of the segment wait for."""
        return 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing of this rank is on its way there, or from there."""
        return True

    def advance(self) -> None:
        """Do all that can be done now."""

    def conditions(self, task: Task) -> list[Condition]:
        """What a task waits for where it is none of the segment's."""
        return []

    def failure(self) -> RaydistError | None:
        """Why the group has failed, as others say who do not share the segment. Asked some times a second."""
        return None

    def post(self, failure: RaydistError) -> None:
        """Tell them why it has."""

    def absent(self) -> tuple[int, ...]:
        """The ranks of which there is no sign, found out in a moment; none where that cannot be."""
        return ()

    def attend(self) -> None:
        """The rank waits from now on, and has nothing else to do."""

    def leave(self) -> None:
        """It does no more, or for something inside."""

    def sleep(self, conditions: Sequence[Condition], seconds: float) -> bool:
        """While attending: return when something may have come from there, or after `seconds`; else False at once."""
        return False

    def drop(self) -> None:
        """Let go of tensors and connections."""
