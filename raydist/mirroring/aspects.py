"""The three parts of a mirrored object's state: attributes, variables, and lazily fetched states.

Each part caches values that the driver read and finds its writes; `Aspects` forwards events (a step, a new object).
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
from raydist.parameter_servers.rows.local_rows import attach_access
from raydist.pickling.attribute_table import AttributeTable

__all__ = ["Aspects"]


@final
class Aspects:
    """The driver side of all three parts of the state of mirrored objects.

    Args:
        link: Calls methods of the replicas.
        table: Handles of the driver's objects.
        classes: Classes of mirrored objects, which report every attribute access.
        control: Attributes.
        variables: Parameters and buffers.
        states: Optimizer and metric states, fetched when the program reads them.
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
        """Add all changes of the driver to `writes`; return the current attributes, to be given to `mark_sent`."""
        tables = self._control.collect(writes)
        self._variables.collect(writes)
        self._states.collect(writes)
        return tables

    def mark_sent(self, tables: Mapping[int, AttributeTable], *, with_new: bool) -> None:
        """Record that the collected changes were sent; `with_new`: the shipment also contained new objects."""
        self._control.mark_sent(tables, with_new=with_new)
        self._variables.mark_sent()
        self._states.mark_sent()

    def expire(self) -> None:
        """Mark all values that the driver has read as stale."""
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
        """Start mirroring these objects, given with their handles."""
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
        """Drop the records of an object that the program has dropped."""
        self._variables.forget(handle)
        self._control.forget(handle)
        self._states.forget(handle)

    def abandon(self, handle: int, obj: Any) -> None:
        """Make an object plain again because no replica has it."""
        self._table.remove(handle)
        self._control.forget(handle)
        self._states.forget(handle)
        if isinstance(obj, torch.Tensor):
            self._variables.abandon(handle)
            attach_access(obj, None)
        else:
            self._classes.plain(obj)

    def make_plain(self) -> None:
        """Make every mirrored object plain again."""
        to_plain = [functools.partial(self._make_plain, obj) for _, obj in self._table.objects()]
        attempt_all([self._table.clear, self._variables.release, self._states.expire, *to_plain])

    def _make_plain(self, obj: Any) -> None:
        if isinstance(obj, torch.Tensor):
            attach_access(obj, GoneRows())
        else:
            self._classes.plain(obj)
