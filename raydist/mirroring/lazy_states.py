"""The driver side of optimizer states and metric states, which are fetched only when the program reads them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, final

import torch

from raydist.errors import FailedPreconditionError
from raydist.foreign_errors import collect_errors
from raydist.mirroring.handles import DriverTable
from raydist.mirroring.messages import MirrorCalls, ReplicaLink, TensorImage, Writes
from raydist.mirroring.metric_states import (
    divide_states,
    held_names,
    list_lengths,
    merge_states,
    restore_states,
    state_names,
)
from raydist.mirroring.object_kinds import content_digest
from raydist.pickling.attribute_table import AttributePath, AttributeTable, attributes, capture, changed, seal
from raydist.torch_modes import outside_inference_mode

__all__ = ["LazyStates"]


@final
class LazyStates:
    """Optimizer states (equal everywhere, read from the first replica) and metric states (merged over replicas)."""

    def __init__(self, link: ReplicaLink, table: DriverTable, *, loads: Callable[[bytes], Any]) -> None:
        self._link = link
        self._table = table
        self._loads = loads
        self._digest = content_digest(table.handle_of)
        self._known: dict[int, AttributeTable] = {}
        self._optimizers: set[int] = set()
        self._metrics: set[int] = set()
        self._shares: dict[int, list[dict[str, Any]]] = {}  # states of metrics on each replica
        self._alone: dict[int, dict[str, int]] = {}  # items of lists that the first replica has from the driver
        self._fresh: set[int] = set()
        self._seen: set[int] = set()  # states that the program on the driver may hold
        self._written: set[int] = set()
        self._read: dict[int, dict[AttributePath, TensorImage]] = {}  # since the last step

    def add(self, obj: Any, handle: int) -> None:
        """Record the present state of `obj` as the state that the replicas hold."""
        if isinstance(obj, torch.optim.Optimizer):
            self._optimizers.add(handle)
        elif state_names(obj):
            self._metrics.add(handle)
            self._alone[handle] = list_lengths(obj)
        else:
            return
        self._fresh.add(handle)
        self._known[handle] = self._capture(obj)
        if self._known[handle]:
            self._seen.add(handle)

    def forget(self, handle: int) -> None:
        """Drop the records of an object that the program has dropped."""
        for held in (self._optimizers, self._metrics, self._fresh, self._seen, self._written):
            held.discard(handle)
        self._known.pop(handle, None)
        self._read.pop(handle, None)
        self._alone.pop(handle, None)
        self._shares.pop(handle, None)

    def shares(self, obj: Any, handle: int) -> list[dict[str, Any]]:
        """Return the states of a metric on each replica, in rank order; empty if unknown."""
        if handle not in self._metrics:
            return []
        self._fetch(obj, handle)
        shares = self._shares.get(handle, [])
        return [] if self._is_written(obj, handle) else shares

    def alone(self, obj: Any, handle: int | None) -> dict[str, int]:
        """Return, by list state, the number of items that the first replica has from the driver after the next step."""
        if handle not in self._metrics or handle is None:
            return list_lengths(obj)
        written = handle in self._seen and self._is_written(obj, handle)
        return list_lengths(obj) if written else self._alone[handle]

    def _is_written(self, obj: Any, handle: int) -> bool:
        now = self._capture_open(obj)
        return bool(changed(self._known[handle], now)) or any(
            not image.shows(now[path].value) for path, image in self._read.get(handle, {}).items()
        )

    def expire(self) -> None:
        """Mark all states as stale because a step was dispatched."""
        self._fresh.clear()
        self._read.clear()

    def before_read(self, obj: Any, handle: int, name: str) -> None:
        """Fetch the state that reading `obj.name` shows."""
        if handle in self._metrics or (handle in self._optimizers and name in ("state", "__dict__")):
            self._fetch(obj, handle)
            self._seen.add(handle)
            if handle not in self._read:
                self._read[handle] = self._values(obj)

    def refresh(self) -> None:
        """Fetch all states."""
        living = [(self._table.object_of(handle), handle) for handle in sorted(self._optimizers | self._metrics)]
        collect_errors([functools.partial(self._fetch, obj, handle) for obj, handle in living if obj is not None])

    @outside_inference_mode
    def _fetch(self, obj: Any, handle: int) -> None:
        if handle in self._fresh:
            return
        self._refuse_blind_write(obj, handle)
        if handle in self._metrics:
            self._fetch_metrics()
        else:
            self._fresh.add(handle)
            state = self._loads(self._link.call(0, MirrorCalls.collect_optimizer_state, handle))
            _take_over(attributes(obj)["state"], state)
            self._known[handle] = self._capture(obj)

    def _fetch_metrics(self) -> None:
        self._fresh |= self._metrics
        per_replica = [self._loads(states) for states in self._link.call_all(MirrorCalls.collect_metrics)]
        for handle in self._metrics:
            metric = self._table.object_of(handle)
            if metric is not None:
                self._shares[handle] = found = [states[handle] for states in per_replica]
                restore_states(metric, merge_states(metric, found, self._alone[handle]))
                self._known[handle] = self._capture(metric)

    def _refuse_blind_write(self, obj: Any, handle: int) -> None:
        now = self._capture_open(obj)
        if changed(self._known[handle], now):
            self._known[handle] = seal(now)  # the next read fetches what the replicas hold
            raise FailedPreconditionError(
                f"The states of {type(obj).__name__} must be read from it before they are changed on the driver; they "
                f"were changed through a reference kept from before the last step, and that change is dropped. Read "
                f"them again, and change them then."
            )

    def collect(self, writes: Writes) -> None:
        """Add the states that the driver changed since the last step to `writes`."""
        self._written.clear()
        for handle in sorted(self._seen):
            obj = self._table.object_of(handle)
            if obj is None or not self._is_written(obj, handle):
                continue
            if handle not in self._fresh:
                self._refuse_blind_write(obj, handle)
            self._written.add(handle)
            if handle in self._metrics:
                writes.metrics[handle] = divide_states(obj)
            else:
                writes.optimizer_states[handle] = dict(attributes(obj)["state"])

    def mark_sent(self) -> None:
        """Record that the changes from `collect` were sent."""
        for handle in self._written:
            obj = self._table.object_of(handle)
            if obj is not None:
                self._known[handle] = self._capture(obj)
                if handle in self._metrics:
                    self._alone[handle] = list_lengths(obj)
        self._written.clear()

    def _values(self, obj: Any) -> dict[AttributePath, TensorImage]:
        """Return copies of the unmirrored tensors in a state, to find writes through `.data` or numpy."""
        held = {path: each.value for path, each in self._capture_open(obj).items()}
        tensors = {path: each for path, each in held.items() if isinstance(each, torch.Tensor)}
        own = {path: each for path, each in tensors.items() if self._table.handle_of(each) is None}
        return {path: TensorImage.of(each.detach().clone()) for path, each in own.items()}

    def _capture(self, obj: Any) -> AttributeTable:
        return seal(self._capture_open(obj))

    def _capture_open(self, obj: Any) -> AttributeTable:
        if isinstance(obj, torch.optim.Optimizer):
            state = attributes(obj)["state"]
            # By handle: the record must not keep parameters alive.
            by_handle: dict[Any, Any] = {self._table.handle_of(p) or id(p): values for p, values in state.items()}
            return capture(by_handle, digest=self._digest)
        held = attributes(obj)
        return capture({name: held[name] for name in held_names(obj)}, digest=self._digest)


def _take_over(state: dict[Any, Any], fresh: dict[Any, Any]) -> None:
    """Replace an optimizer's state in place, down to the dictionary of each parameter."""
    for parameter in [known for known in state if known not in fresh]:
        del state[parameter]
    for parameter, values in fresh.items():
        held = state.get(parameter)
        if isinstance(held, dict) and isinstance(values, dict):
            held.clear()
            held.update(values)
        else:
            state[parameter] = values
