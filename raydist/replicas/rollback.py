"""Snapshots of a replica at the start of steps, to which it goes back after another replica was lost.

Parameters and states of optimizers need no copy in most steps: nothing changes them before the last exchange, and a
replica that has completed its last exchange can end the step. Steps that exchange something after an update need one;
which these are is learned from the first run of each function.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
import torch

from raydist.compat.torch_internals import num_writes
from raydist.mirroring.messages import overwrite
from raydist.mirroring.object_kinds import GENERATORS, kind_of
from raydist.mirroring.replica import MirrorReplica
from raydist.pickling.attribute_table import attributes
from raydist.replicas.own_state import OwnState, OwnStateReader, Seed
from raydist.replicas.recovery_plan import SurvivorStatus

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
_TORCHS = frozenset(torch.nn.Module().__dict__) - {"training"}
_OF_OPTIMIZERS = frozenset({"state", "step", "zero_grad", "param_groups", "defaults"})
_MOST_FUNCTIONS = 256
_MOST_FIRST_BYTES = 256 << 20  # of parameters that are copied before a function is known


@final
class KeptAttributes:
    """The attributes of one object, with copies of the containers and tensors in them; restored in place."""

    def __init__(self, held: dict[str, Any], skip: frozenset[str]) -> None:
        self._held = held
        self._skip = skip
        self._names = tuple(held)
        self._values = {name: _keep(value) for name, value in held.items() if name not in skip}

    def restore(self) -> None:
        for name in [name for name in self._held if name not in self._names]:
            del self._held[name]
        self._held.update({name: _put_back(value) for name, value in self._values.items()})


@final
@dataclass(frozen=True, slots=True)
class _Kept:
    """A container or a tensor, and a copy of its content."""

    value: Any
    content: Any


def _keep(value: Any) -> Any:
    kind = type(value)
    if kind in _CONTAINERS:
        if kind is set:
            return _Kept(value, set(value))
        if isinstance(value, dict):
            return _Kept(value, {key: _keep(item) for key, item in value.items()})
        return _Kept(value, [_keep(item) for item in value])
    if kind is torch.Tensor:
        return _Kept(value, value.detach().clone())
    if kind is np.ndarray and not value.dtype.hasobject:
        return _Kept(value, value.copy())
    return value


def _put_back(kept: Any) -> Any:
    if type(kept) is not _Kept:
        return kept
    value, content = kept.value, kept.content
    if isinstance(value, torch.Tensor):
        overwrite(value, content)
    elif isinstance(value, np.ndarray):
        value[...] = content
    elif isinstance(value, set):
        value.clear()
        value.update(content)
    elif isinstance(value, dict):
        pairs = {key: _put_back(item) for key, item in content.items()}
        value.clear()
        value.update(pairs)
    else:
        items = [_put_back(item) for item in content]
        value.clear()
        value.extend(items)
    return value


def has_own_attributes(obj: Any) -> bool:
    """Return False for a module of torch: its steps change parameters and buffers only."""
    return not (isinstance(obj, torch.nn.Module) and type(obj).__module__.startswith("torch.nn."))


def keep_attributes(obj: Any) -> list[KeptAttributes]:
    """Return the attributes of a mirrored object that a step may change, apart from parameters, buffers and states."""
    held = attributes(obj)
    if isinstance(obj, torch.nn.Module):
        return [KeptAttributes(held, _TORCHS)]
    if isinstance(obj, torch.optim.Optimizer):
        groups = [KeptAttributes(group, frozenset({"params"})) for group in held["param_groups"]]
        return [*groups, KeptAttributes(held, _OF_OPTIMIZERS)]
    return [KeptAttributes(held, frozenset({"optimizer"}))]


@final
@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a replica at a boundary.

    Attributes:
        step: The first step after it.
        shared: The last step before it with an exchange or an update.
        own: What other replicas do not have.
        kept: Attributes of objects.
        writes: Numbers of writes to the parameters so far, by handle.
        values: Parameters by handle, if copied.
        states: States of optimizers by handle, if copied.
        gradients: Gradients by handle, if copied.
    """

    step: int
    shared: int
    own: OwnState
    kept: tuple[KeptAttributes, ...]
    writes: Mapping[int, int]
    values: Mapping[int, torch.Tensor] | None = None
    states: Mapping[int, Any] | None = None
    gradients: Mapping[int, torch.Tensor] | None = None


@final
@dataclass(slots=True)
class _Needs:
    """The copies that a snapshot before a step function needs, besides the replica's own state."""

    values: bool = False
    gradients: bool = False


@final
class Rollback:
    """The snapshots of one replica. `num_calls` returns the number of collectives that it has called.

    Attributes:
        step: Number of the present or last step.
    """

    def __init__(
        self,
        mirror: MirrorReplica,
        device: torch.device,
        own: OwnStateReader,
        num_calls: Callable[[], int],
        multi_update: Literal["copy", "checkpoint"] = "copy",
    ) -> None:
        self._mirror = mirror
        self._device = device
        self._own = own
        self._num_calls = num_calls
        self._copies = multi_update == "copy"
        self._needs: OrderedDict[bytes, _Needs] = OrderedDict()
        self._snapshot: Snapshot | None = None
        self.step = -1
        self._completed = -1
        self._shared = -1
        self._pending = False
        self._dirty = False
        self._is_trained_by_hand = False
        self._digest = b""
        self._calls_before = 0
        self._calls_at_update: int | None = None
        self._calls_at_end: int | None = None
        self._passes_at_update = 0
        self._found_gradients: bool | None = None
        self._num_passes = 0
        self._listed_at = -1
        self._listed: tuple[list[tuple[int, Any]], list[tuple[int, Any]], list[Any]] = [], [], []

    def begin(self, step: int, digest: bytes, seed: Seed | None, *, exchanges_late: bool) -> None:
        """Begin a step; take a snapshot at a boundary.

        Args:
            exchanges_late: raydist itself exchanges something after the function: buffers of replicas without rows.
        """
        self.step, self._digest = step, digest
        self._calls_before = self._num_calls()
        self._calls_at_update = self._calls_at_end = None
        self._passes_at_update = self._num_passes
        if not self._pending:
            self._take(step, seed, exchanges_late=exchanges_late)

    def _take(self, step: int, seed: Seed | None, *, exchanges_late: bool) -> None:
        needs = self._needs.get(self._digest) if self._digest else None
        parameters, optimizers, others = self._objects()
        if needs is None:  # not known yet. A GPU may have no room for a copy.
            num_bytes = sum(each.nbytes for _, each in parameters if each.layout is torch.strided)
            whole = self._device.type == "cpu" and num_bytes <= _MOST_FIRST_BYTES
            needs = _Needs(whole, whole)
        values = (needs.values or exchanges_late) and self._copies
        self._found_gradients = None
        self._snapshot = Snapshot(
            step,
            self._shared,
            self._own.read(seed, all_buffers=True),
            tuple(kept for obj in others for kept in keep_attributes(obj)),
            {key: num_writes(each) for key, each in parameters},
            {key: each.detach().clone() for key, each in parameters} if values else None,
            {key: _copy_state(each) for key, each in optimizers} if values else None,
            {key: each.grad.detach().clone() for key, each in parameters if each.grad is not None}
            if needs.gradients
            else None,
        )

    def _objects(self) -> tuple[list[tuple[int, Any]], list[tuple[int, Any]], list[Any]]:
        """Return the mirrored parameters and optimizers by handle, and all objects with attributes."""
        if self._listed_at != self._mirror.changes:
            items = self._mirror.items()
            self._listed_at = self._mirror.changes
            self._listed = (
                [(handle, obj) for handle, obj in items if isinstance(obj, torch.nn.Parameter)],
                [(handle, obj) for handle, obj in items if isinstance(obj, torch.optim.Optimizer)],
                [obj for _, obj in items if kind_of(obj) not in (None, GENERATORS) and has_own_attributes(obj)],
            )
        return self._listed

    def note_pass(self, found_gradients: bool) -> None:
        """Note a backward pass, and if there were gradients already when it began."""
        self._num_passes += 1
        if self._found_gradients is None:
            self._found_gradients = found_gradients
            if found_gradients and self._snapshot is not None and self._snapshot.gradients is None:
                self._dirty = True

    def noting(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that notes the update, and then calls the `step` of an optimizer."""

        @functools.wraps(step)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.before_update()
            return step(*args, **kwargs)

        return noted

    def before_update(self) -> None:
        """Note that an optimizer steps now. On a GPU, wait for the gradients: an aborted exchange must not reach it."""
        if self._device.type == "cuda" and self._calls_at_update is None:
            torch.cuda.current_stream(self._device).synchronize()
        self._passes_at_update = self._num_passes
        if self._calls_at_update is None:
            self._calls_at_update = self._num_calls()
            if self._snapshot is not None and self._snapshot.values is None:
                self._dirty = True

    def note_draw(self) -> None:
        """Note that the step has drawn a batch from an iterator, which it would not get again."""
        self._dirty = True

    def function_ended(self) -> None:
        """Note that the step function has returned."""
        self._calls_at_end = self._num_calls()

    def end(self, *, shared: bool = False) -> None:
        """Note that the step has been completed; `shared` is True if it changed what all replicas hold alike."""
        updated = self._calls_at_update is not None
        self._learn()
        if shared or updated or self._num_calls() > self._calls_before:
            self._shared = self.step
        self._pending = (self._pending and not updated) or self._num_passes > self._passes_at_update
        # Without an optimizer the program changes parameters itself, maybe through `.data`, which leaves no trace.
        by_hand = self._is_trained_by_hand or (self._pending and not self._objects()[1])
        self._is_trained_by_hand = by_hand and not updated
        self._completed = self.step
        if not self._pending:
            self._dirty = False

    def _learn(self) -> None:
        if not self._digest:
            return
        needs = self._needs.setdefault(self._digest, _Needs())
        self._needs.move_to_end(self._digest)
        last = self._num_calls() if self._calls_at_end is None else self._calls_at_end
        needs.values |= self._calls_at_update is not None and last > self._calls_at_update
        needs.gradients |= bool(self._found_gradients)
        if len(self._needs) > _MOST_FUNCTIONS:
            self._needs.popitem(last=False)

    @property
    def is_pending(self) -> bool:
        """True if gradients wait for an optimizer step."""
        return self._pending

    @property
    def boundary(self) -> int:
        """The first step since the last boundary; later steps depend on it."""
        if self._pending and self._snapshot is not None:
            return self._snapshot.step
        return self._completed + 1

    @property
    def shared(self) -> int:
        """The last step before the boundary with an exchange or an update."""
        return self._snapshot.shared if self._pending and self._snapshot is not None else self._shared

    def status(self) -> SurvivorStatus:
        """Return the status of this replica, for `plan_recovery`."""
        return SurvivorStatus(
            self.boundary, self.shared, self._dirty or self._is_trained_by_hand or self._has_written()
        )

    def _has_written(self) -> bool:
        """Return True if the program has changed parameters since the boundary, of which there is no copy."""
        kept = self._snapshot
        if kept is None or kept.step != self.boundary or kept.values is not None:
            return False
        return any(
            num_writes(self._mirror.object_of(key)) != count
            for key, count in kept.writes.items()
            if self._mirror.has(key)
        )

    def go_back(self, seed: Seed | None) -> Seed | None:
        """Go back to the last boundary; return the driver's seed of that time, given the present one."""
        kept, mirror = self._snapshot, self._mirror
        if kept is None or kept.step != self.boundary:  # nothing has begun since
            self.start_from(self.boundary, self.shared)
            return seed
        for each in kept.kept:
            each.restore()
        kept.own.restore(mirror, self._device)
        for handle, value in (kept.values or {}).items():
            if mirror.has(handle):
                overwrite(mirror.object_of(handle), value)
        for handle, state in (kept.states or {}).items():
            if mirror.has(handle):
                held = attributes(mirror.object_of(handle))["state"]
                held.clear()
                held.update(state)
        mirror.set_gradients(kept.gradients or {})
        dirty = self._dirty
        self.start_from(kept.step, kept.shared)
        self._dirty = dirty  # until it takes over another replica's state
        return kept.own.seed

    def start_from(self, step: int, shared: int) -> None:
        """Begin a new generation at a boundary, with a whole state."""
        self._completed, self._shared = step - 1, shared
        self._pending = self._dirty = False
        self._num_passes = self._passes_at_update = 0
        self._listed_at = -1


def _copy_state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    return {parameter: _copied(state) for parameter, state in attributes(optimizer)["state"].items()}


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value
