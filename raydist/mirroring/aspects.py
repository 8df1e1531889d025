"""What of a mirrored object has another half on the replicas: its attributes, its variables, and its larger states.

Each of the three keeps what was read and finds what was written by itself; here they are told the same.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from raydist.mirroring.attempt import attempt_all
from raydist.mirroring.attributes import ControlState
from raydist.mirroring.calls import ReplicaLink
from raydist.mirroring.handles import DriverTable
from raydist.mirroring.lazy_states import LazyStates
from raydist.mirroring.mirrored_rows import GoneRows, MirroredRows
from raydist.mirroring.objects import MirroredClasses
from raydist.mirroring.shipment import Writes
from raydist.mirroring.variables import Variables
from raydist.parameter_servers.rows.access import attach_access
from raydist.pickling.attribute_table import AttributeTable

__all__ = ["Aspects"]


@final
class Aspects:
    """The driver's half of all of them.

    Args:
        link: The way to the replicas.
        table: What they know objects by.
        classes: Of objects whose reads and writes are seen.
        control: Attributes.
        variables: Parameters and buffers.
        states: Those that are fetched when they are read.
    """

    def __init__(
        self,
        link: ReplicaLink,
        table: DriverTable,
        classes: MirroredClasses,
        control: ControlState,
        variables: Variables,
        states: LazyStates,
    ) -> None:
        self._link = link
        self._table = table
        self._classes = classes
        self._control = control
        self._variables = variables
        self._states = states

    def collect(self, writes: Writes) -> dict[int, AttributeTable]:
        """Add what the driver has changed to `writes`. Attributes as they are now are given to `mark_sent`."""
        tables = self._control.collect(writes)
        self._variables.collect(writes)
        self._states.collect(writes)
        return tables

    def mark_sent(self, tables: Mapping[int, AttributeTable], *, with_new: bool) -> None:
        """What was collected is on its way; `with_new` objects, or without."""
        self._control.mark_sent(tables, with_new=with_new)
        self._variables.mark_sent()
        self._states.mark_sent()

    def expire(self) -> None:
        """What was read is stale."""
        self._variables.expire()
        self._control.expire()
        self._states.expire()

    def refresh(self) -> None:
        """Fetch everything that changed on the replicas."""
        attempt_all(
            [
                lambda: self._control.refresh(modules=True),
                lambda: self._control.refresh(modules=False),
                self._variables.refresh,
                self._states.refresh,
            ]
        )

    def adopt(self, new: Sequence[tuple[int, Any]]) -> None:
        """These objects are mirrored from now on, by their handles."""
        for handle, obj in new:
            self._table.add(obj, handle)
        for handle, obj in new:
            if isinstance(obj, torch.Tensor):
                self._variables.add(obj, handle)
                attach_access(obj, MirroredRows(self._link, handle))
            else:
                self._control.add(obj, handle)
                self._states.add(obj, handle)
                self._classes.mirror(obj)

    def forget(self, handle: int) -> None:
        """Nobody has that object any more."""
        self._variables.forget(handle)
        self._control.forget(handle)
        self._states.forget(handle)

    def abandon(self, handle: int, obj: Any) -> None:
        """The object is mirrored no more: no replica has it."""
        self._table.remove(handle)
        self._control.forget(handle)
        self._states.forget(handle)
        if isinstance(obj, torch.Tensor):
            self._variables.abandon(handle)
            attach_access(obj, None)
        else:
            self._classes.plain(obj)

    def make_plain(self) -> None:
        """Nothing is mirrored any more."""
        to_plain = [functools.partial(self._make_plain, obj) for _, obj in self._table.objects()]
        attempt_all([self._table.clear, self._variables.release, self._states.expire, *to_plain])

    def _make_plain(self, obj: Any) -> None:
        if isinstance(obj, torch.Tensor):
            attach_access(obj, GoneRows())
        else:
            self._classes.plain(obj)
