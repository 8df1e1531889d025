"""States of optimizers and metrics (momentum, totals): how replicas' states merge, and the driver's cache of them.

The driver fetches a state when the program reads it.

The state of an optimizer is equal on all replicas. Each replica accumulates its own states of a torchmetrics metric,
and the driver reads the merged states. States are merged as torchmetrics merges ranks, by each state's
`dist_reduce_fx`. A value that the driver writes must merge to the written value again: a sum or a list goes to the
first replica, with defaults on the others, and any other state (a maximum, a mean) goes to all. For a custom reduction,
calling the function once tells the two cases apart.

The update count of a metric is a state, too: a merge leaves out replicas without updates, lest defaults enter a mean.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch

from raydist.checkpoints.object_state import RESTORED_BY_RANK
from raydist.compat.torch_internals import module_table
from raydist.core.errors import FailedPreconditionError
from raydist.core.exception_utils import collect_errors
from raydist.mirroring.handles import DriverTable
from raydist.mirroring.messages import MirrorCalls, ReplicaLink, TensorImage, Writes
from raydist.mirroring.object_kinds import content_digest, is_metric
from raydist.pickling.attribute_table import AttributePath, AttributeTable, attributes, capture, changed, seal
from raydist.utils.torch_modes import outside_inference_mode

_UPDATES = "_update_count"

States = dict[str, Any]


def state_names(obj: Any) -> tuple[str, ...]:
    """Return the names of the states of a metric; empty for other objects."""
    return tuple(attributes(obj)["_defaults"]) if isinstance(obj, torch.nn.Module) and is_metric(obj) else ()


def metrics_in(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return all metrics among objects by name, and metrics inside modules by name and path. Does not block.

    >>> list(metrics_in({"model": torch.nn.ModuleDict({"mean": rd.Mean()}), "sum": rd.Mean()}))
    ['model/mean', 'sum']
    """
    places = ((name, obj) for name, each in objects.items() for name, obj in _places(name, each))
    return {name: obj for name, obj in places if state_names(obj)}


def _places(name: str, obj: Any) -> Iterator[tuple[str, Any]]:
    yield name, obj
    for key, part in module_table(obj).items() if isinstance(obj, torch.nn.Module) else ():
        yield from _places(f"{name}/{key}", part)


def held_names(obj: Any) -> tuple[str, ...]:
    """Return the names of everything a metric accumulates: the states and the update count."""
    names = state_names(obj)
    return (*names, _UPDATES) if names and _UPDATES in attributes(obj) else names


def hold_states(metric: Any, device: torch.device | None = None) -> States:
    """Return a copy of a metric's states, on `device` if given. Updates may change tensors in place, hence a copy."""
    held = attributes(metric)
    return {name: _copy(held[name], device) for name in held_names(metric)}


def list_lengths(metric: Any) -> dict[str, int]:
    """Return the lengths of the states that are lists."""
    held = attributes(metric)
    return {name: len(held[name]) for name in state_names(metric) if isinstance(held[name], list)}


def restore_states(metric: Any, states: States) -> None:
    """Set a metric's states to copies of these states; a cached result is dropped."""
    device = _device(metric)
    held = attributes(metric)
    held.update({name: _copy(value, device) for name, value in states.items()})
    held["_computed"] = None


def _device(metric: Any) -> torch.device | None:
    tensors = [value for value in hold_states(metric).values() if isinstance(value, torch.Tensor)]
    return tensors[0].device if tensors else None


def _copy(value: Any, device: torch.device | None = None) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().to(device if device is not None else value.device)
    if isinstance(value, int):
        return value
    return [_copy(item, device) for item in value]


def merge_states(metric: Any, per_replica: Sequence[States], driver_items: Mapping[str, int] | None = None) -> States:
    """Merge the states of one metric over all replicas.

    `driver_items` has the number of items that each list of the first replica has from the driver; the items after
    them are merged in the order of steps, as on one device.
    """
    reductions: dict[str, Callable[[Any], Any] | None] = attributes(metric)["_reductions"]
    counted = [states for states in per_replica if states.get(_UPDATES, 1)] or per_replica[:1]
    merged = {
        name: _merge([states[name] for states in counted], reductions.get(name), (driver_items or {}).get(name, 0))
        for name in state_names(metric)
    }
    updates = [states[_UPDATES] for states in counted if _UPDATES in states]
    return {**merged, _UPDATES: max(updates)} if updates else merged


def _merge(values: list[Any], reduction: Callable[[Any], Any] | None, num_driver_items: int) -> Any:
    if isinstance(values[0], list):
        return _in_order_of_steps(values, num_driver_items)
    if len(values) == 1:
        return values[0]
    if reduction is not None and getattr(reduction, "__name__", "") == "dim_zero_cat":
        return torch.cat([value.reshape(1) if value.dim() == 0 else value for value in values])
    stacked = torch.stack(values)
    return stacked if reduction is None else reduction(stacked)


def _in_order_of_steps(lists: Sequence[list[Any]], num_driver_items: int) -> list[Any]:
    """Interleave the items of lists by step, after the first `num_driver_items` items of the first list.

    >>> _in_order_of_steps([["driver", "a0", "b0"], ["a1"]], 1)
    ['driver', 'a0', 'a1', 'b0']
    """
    steps = itertools.zip_longest(lists[0][num_driver_items:], *lists[1:], fillvalue=_NOTHING)
    return [*lists[0][:num_driver_items], *(item for step in steps for item in step if item is not _NOTHING)]


_NOTHING = object()


def divide_states(metric: Any) -> tuple[States, States]:
    """Return states for the first replica and for each other one that merge to the metric's present states."""
    held = attributes(metric)
    first = {name: _copy(held[name]) for name in state_names(metric)}
    others = {name: _others_state(metric, name, value) for name, value in first.items()}
    if _UPDATES in held:
        adds_up = all(_adds_up_in(metric, name, value) for name, value in first.items())
        first[_UPDATES], others[_UPDATES] = held[_UPDATES], 0 if adds_up else held[_UPDATES]
    return first, others


def states_for_rank(metric: Any, states: tuple[States, States], rank: int, world_size: int) -> States:
    """Return the states for one replica after the driver wrote the metric's states, given by `divide_states`."""
    first, others = states
    restored = attributes(metric).get(RESTORED_BY_RANK)
    if restored and len(restored) == world_size and not any(isinstance(value, list) for value in first.values()):
        merged = merge_states(metric, restored)
        if merged.keys() == first.keys() and all(map(_same, merged.values(), first.values())):
            return dict(restored[rank])  # bitwise equal: a sum of floats depends on the order
    return first if rank == 0 else others


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _others_state(metric: Any, name: str, value: Any) -> Any:
    return _copy(attributes(metric)["_defaults"][name] if _adds_up_in(metric, name, value) else value)


def _adds_up_in(metric: Any, name: str, value: Any) -> bool:
    held = attributes(metric)
    return _adds_up(held["_reductions"].get(name), value, held["_defaults"][name])


def _adds_up(reduction: Callable[[Any], Any] | None, value: Any, default: Any) -> bool:
    """Return True if `value` on one replica and defaults on the others merge to `value`; else all must hold `value`."""
    kind = getattr(reduction, "__name__", "")
    if isinstance(value, list) or reduction is None or kind in ("dim_zero_sum", "dim_zero_cat"):
        return True
    if kind in ("dim_zero_mean", "dim_zero_max", "dim_zero_min"):
        return False
    # A custom reduction: call it to find out.
    merged = reduction(torch.stack([value, _copy(default, value.device)]))
    return isinstance(merged, torch.Tensor) and merged.shape == value.shape and bool(torch.equal(merged, value))


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
        self._by_rank: dict[int, list[dict[str, Any]]] = {}  # states of metrics on each replica
        self._driver_items: dict[int, dict[str, int]] = {}  # items of lists that the first replica has from the driver
        self._fresh: set[int] = set()
        self._seen: set[int] = set()  # states that the program on the driver may hold
        self._written: set[int] = set()
        self._to_divide: set[int] = set()  # metrics that the next step sends, though nobody has changed them
        self._read: dict[int, dict[AttributePath, TensorImage]] = {}  # since the last step

    def add(self, obj: Any, handle: int) -> None:
        """Record the present state of `obj` as the state that the replicas hold."""
        if isinstance(obj, torch.optim.Optimizer):
            self._optimizers.add(handle)
        elif state_names(obj):
            self._metrics.add(handle)
            self._driver_items[handle] = list_lengths(obj)
        else:
            return
        self._fresh.add(handle)
        self._known[handle] = self._capture(obj)
        if self._known[handle]:
            self._seen.add(handle)

    def forget(self, handle: int) -> None:
        """Drop the records of an object that the program has dropped."""
        for held in (self._optimizers, self._metrics, self._fresh, self._seen, self._written, self._to_divide):
            held.discard(handle)
        self._known.pop(handle, None)
        self._read.pop(handle, None)
        self._driver_items.pop(handle, None)
        self._by_rank.pop(handle, None)

    def states_by_rank(self, obj: Any, handle: int) -> list[dict[str, Any]]:
        """Return the states of a metric on each replica, in rank order; empty if unknown."""
        if handle not in self._metrics:
            return []
        self._fetch(obj, handle)
        by_rank = self._by_rank.get(handle, [])
        return [] if self._is_written(obj, handle) else by_rank

    def driver_items(self, obj: Any, handle: int | None) -> dict[str, int]:
        """Return, by list state, the number of items that the first replica has from the driver after the next step."""
        if handle not in self._metrics or handle is None:
            return list_lengths(obj)
        written = handle in self._seen and self._is_written(obj, handle)
        return list_lengths(obj) if written else self._driver_items[handle]

    def divide_anew(self) -> None:
        """Fetch the states of metrics, and send them to all replicas with the next step."""
        for handle in self._metrics:
            metric = self._table.object_of(handle)
            if metric is not None:
                self._fetch(metric, handle)
                self._to_divide.add(handle)

    def _is_written(self, obj: Any, handle: int) -> bool:
        if handle in self._to_divide:
            return True
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
                self._by_rank[handle] = found = [states[handle] for states in per_replica]
                restore_states(metric, merge_states(metric, found, self._driver_items[handle]))
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
        for handle in sorted(self._seen | self._to_divide):
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
                    self._driver_items[handle] = list_lengths(obj)
        self._written.clear()
        self._to_divide.clear()

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
