"""The hosts that a rank shares no memory with, as its generation sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from raydist.collectives.base import Membership
from raydist.collectives.bulletin import Bulletin
from raydist.collectives.hierarchical.messages import RemoteMessages
from raydist.collectives.hierarchical.plan import HostPlan
from raydist.collectives.shared_memory.outside import Outside
from raydist.collectives.shared_memory.task import Condition, Task
from raydist.collectives.wires.wires import Wires
from raydist.errors import RaydistError

__all__ = ["OtherHosts"]

_ROLL_CALL_S = 0.3


@final
class OtherHosts(Outside):
    """Messages to them, and what they say of failures.

    Args:
        membership: This rank's place in the whole group.
        plan: Who shares memory with whom.
        bulletin: Where failures are posted.
        wires: Connections; they belong to this object from now on.
    """

    calls_the_roll = True
    is_empty = False

    def __init__(self, membership: Membership, plan: HostPlan, bulletin: Bulletin, wires: Wires) -> None:
        super().__init__(membership, plan.members)
        self.wires = wires
        self.messages = RemoteMessages(membership.rank, wires)
        self._bulletin = bulletin

    @property
    def num_under_way(self) -> int:
        return self.messages.num_under_way

    @property
    def is_idle(self) -> bool:
        return not self.messages.num_under_way and not self.wires.is_busy

    def advance(self) -> None:
        self.messages.advance()

    def conditions(self, task: Task) -> list[Condition]:
        return self.messages.conditions(task)

    def failure(self) -> RaydistError | None:
        return self._bulletin.failure()

    def post(self, failure: RaydistError) -> None:
        self._bulletin.post(failure)

    def absent(self) -> tuple[int, ...]:
        return self._bulletin.roll_call(_ROLL_CALL_S)

    def attend(self) -> None:
        self.wires.attend()

    def leave(self) -> None:
        self.wires.leave()

    def sleep(self, conditions: Sequence[Condition], seconds: float) -> bool:
        if not any(condition.outside() for condition in conditions):
            return False
        self.wires.sleep(seconds)
        return True

    def drop(self) -> None:
        self.messages.drop()
        self.wires.close()
