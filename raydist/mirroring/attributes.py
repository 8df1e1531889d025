"""The driver side of control state: attributes are read from the first replica, and changes are sent to all replicas.

Program order holds: before the program uses an attribute, the driver fetches the changes of all dispatched steps, so
that a change by the program comes after them. Only objects that the program holds directly (a list or a `param_group`
kept since before the step, a generator) can change on both sides unnoticed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, final

import torch

from raydist.compat import torch_internals as own_tables
from raydist.core.errors import FailedPreconditionError
from raydist.core.exception_utils import collect_errors
from raydist.mirroring.handles import DriverTable
from raydist.mirroring.messages import MirrorCalls, ReplicaLink, Writes
from raydist.mirroring.object_kinds import (
    GENERATORS,
    MODULES,
    OPTIMIZERS,
    capture_object,
    content_digest,
    is_just_seeded,
    is_unchanged,
    kind_of,
    patch_object,
    snapshot_object,
)
from raydist.pickling.attribute_table import (
    Attribute,
    AttributePath,
    AttributeTable,
    IdentitySnapshot,
    Keys,
    attribute_name,
    changed,
    seal,
)
from raydist.pickling.torch_objects import require_step_of_class
from raydist.utils.torch_modes import outside_inference_mode


@final
class ControlState:
    """The attributes of every mirrored object of one strategy.

    `loads` unpickles the answers of replicas; `set_flag` is called with (handle, requires_grad) when a step changed the
    flag of a tensor.
    """

    def __init__(
        self,
        link: ReplicaLink,
        table: DriverTable,
        *,
        loads: Callable[[bytes], Any],
        set_flag: Callable[[int, bool], None],
    ) -> None:
        self._link = link
        self._table = table
        self._loads = loads
        self._set_flag = set_flag
        self._digest = content_digest(table.handle_of)
        self._known: dict[int, AttributeTable] = {}
        self._snapshots: dict[int, IdentitySnapshot] = {}  # of states in `_known` that have one
        self._conflicts: dict[int, frozenset[AttributePath]] = {}
        self._touched: set[int] = set()
        self._always: set[int] = set()
        self._fresh = {True: True, False: True}

    def add(self, obj: Any, handle: int) -> None:
        """Record the present state of `obj` as the state that the replicas hold."""
        flat = self._capture(obj)
        self._known[handle] = seal(flat)
        if _is_open(obj, flat):
            self._always.add(handle)

    def forget(self, handle: int) -> None:
        """Drop the records of an object that the program has dropped."""
        for held in (self._known, self._snapshots, self._conflicts):
            held.pop(handle, None)
        self._touched.discard(handle)
        self._always.discard(handle)

    def expire(self) -> None:
        """Mark all attributes as stale because a step was dispatched."""
        self._fresh = {True: False, False: False}
        self._conflicts.clear()

    def touch(self, obj: Any, handle: int) -> None:
        """Fetch the state of `obj` before the program uses an attribute, and compare the state before the next step."""
        self._touched.add(handle)
        self.refresh(modules=issubclass(type(obj), torch.nn.Module))

    def overwrite(self, handle: int, name: str) -> None:
        """Drop the conflicts of an attribute that the program is about to set: the new value replaces both."""
        if handle in self._conflicts:
            self._conflicts[handle] = frozenset(path for path in self._conflicts[handle] if path[0] != name)

    @outside_inference_mode
    def refresh(self, *, modules: bool) -> None:
        """Fetch the changes of dispatched steps: of modules and `requires_grad`, or of all other objects. Blocks."""
        if self._fresh[modules]:
            return
        self._fresh[modules] = True  # set first: applying changes reads attributes, which calls refresh()
        try:
            changes, flags = self._loads(self._link.call(0, MirrorCalls.collect_control, modules))
        except BaseException:
            self._fresh[modules] = False
            raise
        # The replica reports each change once: all must be applied, even if one fails.
        living = [(handle, self._table.object_of(handle), change) for handle, change in changes.items()]
        arrivals = [functools.partial(self._take_over, *change) for change in living if change[1] is not None]
        collect_errors([*arrivals, *(functools.partial(self._set_flag, *flag) for flag in flags.items())])

    def _take_over(self, handle: int, obj: Any, change: Mapping[AttributePath, Any]) -> None:
        """Apply the changes of replicas, except to paths that the driver has changed in the meantime."""
        known = self._known.get(handle, {})
        self._snapshots.pop(handle, None)
        mine = changed(known, self._capture(obj))
        both = frozenset(path for path in change if path in mine and _can_conflict(obj, path))
        if both:
            self._conflicts[handle] = both | self._conflicts.get(handle, frozenset())
        patch_object(obj, {path: value for path, value in change.items() if path not in mine})
        now = seal(self._capture(obj))
        for path in mine:
            if path in known:
                now[path] = known[path]
            else:
                now.pop(path, None)
        self._known[handle] = now

    def collect(self, writes: Writes) -> dict[int, AttributeTable]:
        """Add the driver's changes since the last step to `writes`; return the states to give to :meth:`mark_sent`."""
        states: dict[int, AttributeTable] = {}
        for handle in sorted(self._touched | self._always):
            obj = self._table.object_of(handle)
            if obj is None:
                self.forget(handle)
                continue
            if kind_of(obj) is OPTIMIZERS:
                require_step_of_class(obj)
            if handle in self._snapshots and is_unchanged(obj, self._snapshots[handle]):
                continue
            states[handle], values = self._changes(handle, obj)
            if values:
                writes.control[handle] = values
        return states

    def _changes(self, handle: int, obj: Any) -> tuple[AttributeTable, dict[AttributePath, Any]]:
        now = self._capture(obj)
        values = changed(self._known[handle], now)
        if not values:
            return now, values
        self.refresh(modules=issubclass(type(obj), torch.nn.Module))
        now = self._capture(obj)
        values = changed(self._known[handle], now)
        self._refuse_conflict(handle, obj, values)
        return now, values

    def _refuse_conflict(self, handle: int, obj: Any, values: Mapping[AttributePath, Any]) -> None:
        both = sorted(attribute_name(path) for path in self._conflicts.get(handle, ()) if path in values)
        if not both:
            return
        self._conflicts.pop(handle)
        kind = kind_of(obj)
        if kind is GENERATORS:
            if not is_just_seeded(obj):
                raise FailedPreconditionError(_DRAWN_TWICE)
            return
        raise FailedPreconditionError(
            f"What steps change must be read from its owner before the driver changes it. {both[0]} of the "
            f"{kind.name if kind else 'object'} {type(obj).__name__} was changed by a step on the replicas, and on the "
            f"driver through a reference kept from before it, so it is unknown which came last. Get it anew after the "
            f"run, and change it then; the next run would take the driver's value."
        )

    def mark_sent(self, states: Mapping[int, AttributeTable], *, with_new: bool) -> None:
        """Record that the states from `collect` were sent: the replicas will hold them.

        With `with_new`, further objects (for example a parameter that the program added to a group) have got handles
        since `collect`, so the states are captured again with these handles.
        """
        for handle, found in states.items():
            obj = self._table.object_of(handle)
            flat = self._capture(obj) if with_new and obj is not None else found
            self._known[handle] = seal(flat)
            if _is_open(obj, flat):
                self._always.add(handle)
            self._snapshots.pop(handle, None)
            if obj is not None and (snapshot := snapshot_object(obj, self._digest)) is not None:
                self._snapshots[handle] = snapshot
        self._touched.clear()

    def _capture(self, obj: Any) -> AttributeTable:
        return capture_object(obj, self._digest)


_DRAWN_TWICE = (
    "Numbers must be drawn from a torch.Generator on one side only between two steps. The state of the generator was "
    "changed by a step on the replicas and then by a draw on the driver, which cannot see that step's draws. Draw in "
    "the step only, or on the driver only, from a generator of its own; the next run would take the driver's state."
)

_THROUGH_THE_MODULE = (own_tables.PARAMETERS, own_tables.BUFFERS, own_tables.MODULES)


def _is_open(obj: Any, flat: AttributeTable) -> bool:
    """Return True if the state can change without an access to the object: through a dict or list in it, or in C.

    A module's parameters and submodules are exchanged through the module; a hook is removed through its handle.
    """
    if kind_of(obj) is not MODULES:
        return True
    own = [(path, attribute) for path, attribute in flat.items() if path[0] not in _THROUGH_THE_MODULE]
    return any(_is_worth_holding(path, attribute) for path, attribute in own)


def _is_worth_holding(path: AttributePath, attribute: Attribute) -> bool:
    """Return True if the program may hold and change this value; torch's own empty dicts and sets do not count."""
    is_container = len(path) > 1 and path[-1] is Keys
    if str(path[0]).startswith("_"):
        return is_container and bool(attribute.value.names)
    return is_container or attribute.mark is not None


def _can_conflict(obj: Any, path: AttributePath) -> bool:
    """Return False for a module's `training` flag and private attributes, where the later setting simply wins."""
    return not (kind_of(obj) is MODULES and (path[0] == "training" or path[0] is Keys or str(path[0]).startswith("_")))
