"""Groups of all chips of a TPU slice."""

from __future__ import annotations

from typing import final

import torch
from torch._C._distributed_c10d import Store

from raydist.collectives.base import Membership
from raydist.collectives.flights import Flight
from raydist.collectives.process_group_backend import ProcessGroupBackend, RawGroup, RawWork
from raydist.collectives.xla.chip import Chip
from raydist.collectives.xla.communicator import XlaCommunicator
from raydist.collectives.xla.group import XlaGroup
from raydist.errors import FailedPreconditionError, UnavailableError

__all__ = ["XlaBackend"]


@final
class XlaBackend(ProcessGroupBackend):
    """The links between the chips of a TPU slice, by torch_xla.

    Args:
        chip: The rank's, for the groups of one communicator.
        group: The one that the chip was in before.
    """

    name = "xla"
    devices = ("xla",)

    def __init__(self, chip: Chip | None = None, group: XlaGroup | None = None) -> None:
        self._chip = chip
        self._group = group
        self._last: XlaBackend | None = None

    def communicator(self, membership: Membership, device: torch.device, timeout_s: float) -> XlaCommunicator:
        chip = Chip(device.index or 0)
        self._last = groups = XlaBackend(chip, None if self._last is None else self._last._group)
        return XlaCommunicator(membership, chip, timeout_s, groups, leave=groups.close)

    def create(self, store: Store, membership: Membership, timeout_s: float) -> RawGroup:
        if self._chip is None:
            raise FailedPreconditionError(f"raydist bug: rank {membership.rank} must have a chip.")
        self.close()
        if self._group is not None and self._group.stuck:
            raise UnavailableError(
                f"The chip of rank {membership.rank} is still in a collective that another chip has left, and cannot "
                "be stopped. Close the strategy and make a new one: its processes start anew."
            )
        self._group = XlaGroup(store, membership, self._chip.open(), timeout_s)
        return self._group.start()

    def close(self) -> None:
        """Leave the group, so that the others notice. May be called twice."""
        if self._group is not None:
            self._group.close()

    def collective(self, work: RawWork) -> Flight:
        flight: Flight = work
        return flight

    def point_to_point(self, work: RawWork) -> Flight:
        flight: Flight = work
        return flight

    def kill(self, group: RawGroup) -> None:
        """What is on the chip cannot be stopped; what is not, is given up by all ranks or by none."""
        given_up: XlaGroup = group
        given_up.give_up()
        given_up.close()
