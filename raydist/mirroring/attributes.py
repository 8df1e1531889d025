"""The driver half for control state: attributes read fresh from the first replica, changed ones sent to all.

Program order decides: before an attribute is used, what the dispatched steps did to it is fetched, so what the program
does then comes after them. Only what it changes past the object (a list or a `param_group` that it has held since
before the step, a generator) can be changed on both sides unseen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, final

import torch

from raydist.compat import torch_internals as own_tables
from raydist.errors import FailedPreconditionError
from raydist.mirroring.attempt import attempt_all
from raydist.mirroring.calls import MirrorCalls, ReplicaLink
from raydist.mirroring.handles import DriverTable
from raydist.mirroring.kinds import (
    GENERATORS,
    MODULES,
    OPTIMIZERS,
    capture_object,
    content_digest,
    is_as_witnessed,
    is_just_seeded,
    kind_of,
    patch_object,
    witness_object,
)
from raydist.mirroring.shipment import Writes
from raydist.pickling.attribute_table import (
    Attribute,
    AttributePath,
    AttributeTable,
    Keys,
    attribute_name,
    changed,
    seal,
)
from raydist.pickling.step_methods import require_step_of_class
from raydist.pickling.witness import Witness
from raydist.torch_modes import outside_inference_mode

__all__ = ["ControlState"]


@final
class ControlState:
    """Attributes of every mirrored object of one strategy.

    Args:
        link: The way to the replicas.
        table: Handles of the driver's objects.
        resolve: Object of a persistent id in what the replicas send.
        set_flag: Called with (handle, requires_grad) when replicas toggled a tensor.
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
        self._witnesses: dict[int, Witness] = {}  # of the states in `_known`, where a quick look is enough
        self._conflicts: dict[int, frozenset[AttributePath]] = {}
        self._touched: set[int] = set()
        self._always: set[int] = set()
        self._fresh = {True: True, False: True}

    def add(self, obj: Any, handle: int) -> None:
        """The replicas hold the present state of `obj`."""
        flat = self._capture(obj)
        self._known[handle] = seal(flat)
        if _is_open(obj, flat):
            self._always.add(handle)

    def forget(self, handle: int) -> None:
        """The program dropped an object."""
        for held in (self._known, self._witnesses, self._conflicts):
            held.pop(handle, None)
        self._touched.discard(handle)
        self._always.discard(handle)

    def expire(self) -> None:
        """A step was dispatched: the replicas' state is the newer one."""
        self._fresh = {True: False, False: False}
        self._conflicts.clear()

    def touch(self, obj: Any, handle: int) -> None:
        """An attribute of `obj` is about to be used: fetch the state, and compare it before the next step."""
        self._touched.add(handle)
        self.refresh(modules=issubclass(type(obj), torch.nn.Module))

    def overwrite(self, handle: int, name: str) -> None:
        """An attribute is about to be set: that comes last, whatever happened to what it held."""
        if handle in self._conflicts:
            self._conflicts[handle] = frozenset(path for path in self._conflicts[handle] if path[0] != name)

    @outside_inference_mode
    def refresh(self, *, modules: bool) -> None:
        """Fetch what changed, in modules (and `requires_grad`) or in everything else, after the dispatched steps."""
        if self._fresh[modules]:
            return
        self._fresh[modules] = True  # first: taking over changes uses attributes
        try:
            changes, flags = self._loads(self._link.call(0, MirrorCalls.collect_control, modules))
        except BaseException:
            self._fresh[modules] = False
            raise
        # The replica will not report these again: each must arrive, whatever happens to another one.
        living = [(handle, self._table.object_of(handle), change) for handle, change in changes.items()]
        arrivals = [functools.partial(self._take_over, *change) for change in living if change[1] is not None]
        attempt_all([*arrivals, *(functools.partial(self._set_flag, *flag) for flag in flags.items())])

    def _take_over(self, handle: int, obj: Any, change: Mapping[AttributePath, Any]) -> None:
        """Replicas' changes, but for what the driver changed in the meantime, unseen."""
        known = self._known.get(handle, {})
        self._witnesses.pop(handle, None)
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
        """Add what the driver changed since the last step; the states that :meth:`mark_sent` is to be given."""
        states: dict[int, AttributeTable] = {}
        for handle in sorted(self._touched | self._always):
            obj = self._table.object_of(handle)
            if obj is None:
                self.forget(handle)
                continue
            if kind_of(obj) is OPTIMIZERS:
                require_step_of_class(obj)
            if handle in self._witnesses and is_as_witnessed(obj, self._witnesses[handle]):
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
            f"driver through a reference kept from before it, so nobody knows which came last. Get it anew after the "
            f"run, and change it then; the next run would take the driver's value."
        )

    def mark_sent(self, states: Mapping[int, AttributeTable], *, with_new: bool) -> None:
        """What `collect` found is on its way: the replicas will hold these states.

        `with_new`: objects got handles since then, by which states know them from now on (a parameter that the program
        has put into a group, say).
        """
        for handle, found in states.items():
            obj = self._table.object_of(handle)
            flat = self._capture(obj) if with_new and obj is not None else found
            self._known[handle] = seal(flat)
            if _is_open(obj, flat):
                self._always.add(handle)
            self._witness(handle, obj)
        self._touched.clear()

    def _witness(self, handle: int, obj: Any) -> None:
        witness = None if obj is None else witness_object(obj, self._digest)
        if witness is None:
            self._witnesses.pop(handle, None)
        else:
            self._witnesses[handle] = witness

    def _capture(self, obj: Any) -> AttributeTable:
        return capture_object(obj, self._digest)


_DRAWN_TWICE = (
    "Numbers must be drawn from a torch.Generator on one side only between two steps. The state of the generator was "
    "changed by a step on the replicas and then by a draw on the driver, which cannot see that step's draws. Draw in "
    "the step only, or on the driver only, from a generator of its own; the next run would take the driver's state."
)

_THROUGH_THE_MODULE = (own_tables.PARAMETERS, own_tables.BUFFERS, own_tables.MODULES)


def _is_open(obj: Any, flat: AttributeTable) -> bool:
    """Whether the state can be changed past the object: through a dict or list that somebody holds, or in C.

    A module's parameters and submodules are exchanged through the module; a hook is removed through its handle.
    """
    if kind_of(obj) is not MODULES:
        return True
    own = [(path, attribute) for path, attribute in flat.items() if path[0] not in _THROUGH_THE_MODULE]
    return any(_is_worth_holding(path, attribute) for path, attribute in own)


def _is_worth_holding(path: AttributePath, attribute: Attribute) -> bool:
    """Whether somebody might keep this and change it: not torch's own empty dictionaries and sets."""
    is_container = len(path) > 1 and path[-1] is Keys
    if str(path[0]).startswith("_"):
        return is_container and bool(attribute.value.names)
    return is_container or attribute.mark is not None


def _can_conflict(obj: Any, path: AttributePath) -> bool:
    """Modes that either side sets outright follow the later setting; so does what modules keep for themselves."""
    return not (kind_of(obj) is MODULES and (path[0] == "training" or path[0] is Keys or str(path[0]).startswith("_")))
