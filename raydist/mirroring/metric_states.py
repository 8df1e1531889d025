"""States of torchmetrics metrics: each replica accumulates its own states, and the driver reads the merged states.

States are merged as torchmetrics merges ranks, by each state's `dist_reduce_fx`. A value that the driver writes must
merge to the written value again: a sum or a list goes to the first replica, with defaults on the others, and any other
state (a maximum, a mean) goes to all. For a custom reduction, calling the function once tells the two cases apart.

The update count of a metric is a state, too: a merge leaves out replicas without updates, lest defaults enter a mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from raydist.checkpoints.metric_shares import GIVEN_SHARES
from raydist.compat.torch_internals import module_table
from raydist.mirroring.object_kinds import is_metric
from raydist.pickling.attribute_table import attributes

__all__ = [
    "divide_states",
    "held_names",
    "hold_states",
    "list_lengths",
    "merge_states",
    "metrics_in",
    "restore_states",
    "share_of_states",
    "state_names",
]

_UPDATES = "_update_count"

States = dict[str, Any]


def state_names(obj: Any) -> tuple[str, ...]:
    """Return the names of the states of a metric; empty for other objects."""
    return tuple(attributes(obj)["_defaults"]) if _may_hold_states(obj) else ()


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


def _may_hold_states(obj: Any) -> bool:
    return isinstance(obj, torch.nn.Module) and is_metric(obj)


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


def merge_states(metric: Any, per_replica: Sequence[States], alone: Mapping[str, int] | None = None) -> States:
    """Merge the states of one metric over all replicas.

    Args:
        metric: The metric.
        per_replica: The states on each replica.
        alone: Number of items that each list of the first replica has from the driver; the items after them are merged
            in the order of steps, as on one device.
    """
    reductions: dict[str, Callable[[Any], Any] | None] = attributes(metric)["_reductions"]
    counted = [states for states in per_replica if states.get(_UPDATES, 1)] or per_replica[:1]
    merged = {
        name: _merge([states[name] for states in counted], reductions.get(name), (alone or {}).get(name, 0))
        for name in state_names(metric)
    }
    updates = [states[_UPDATES] for states in counted if _UPDATES in states]
    return {**merged, _UPDATES: max(updates)} if updates else merged


def _merge(values: list[Any], reduction: Callable[[Any], Any] | None, alone: int) -> Any:
    if isinstance(values[0], list):
        return _in_order_of_steps(values, alone)
    if len(values) == 1:
        return values[0]
    if reduction is not None and getattr(reduction, "__name__", "") == "dim_zero_cat":
        return torch.cat([value.reshape(1) if value.dim() == 0 else value for value in values])
    stacked = torch.stack(values)
    return stacked if reduction is None else reduction(stacked)


def _in_order_of_steps(lists: Sequence[list[Any]], alone: int) -> list[Any]:
    """Interleave the items of lists by step, after the first `alone` items of the first list.

    >>> _in_order_of_steps([["driver", "a0", "b0"], ["a1"]], 1)
    ['driver', 'a0', 'a1', 'b0']
    """
    steps = itertools.zip_longest(lists[0][alone:], *lists[1:], fillvalue=_NOTHING)
    return [*lists[0][:alone], *(item for step in steps for item in step if item is not _NOTHING)]


_NOTHING = object()


def divide_states(metric: Any) -> tuple[States, States]:
    """Return states for the first replica and for each other one that merge to the metric's present states."""
    held = attributes(metric)
    first = {name: _copy(held[name]) for name in state_names(metric)}
    others = {name: _others_share(metric, name, value) for name, value in first.items()}
    if _UPDATES in held:
        adds_up = all(_adds_up_in(metric, name, value) for name, value in first.items())
        first[_UPDATES], others[_UPDATES] = held[_UPDATES], 0 if adds_up else held[_UPDATES]
    return first, others


def share_of_states(metric: Any, states: tuple[States, States], rank: int, world_size: int) -> States:
    """Return the states for one replica after the driver wrote the metric's states.

    Args:
        metric: The metric.
        states: States for the first replica and for the others, from `divide_states`.
        rank: Rank of the replica.
        world_size: Number of replicas.
    """
    first, others = states
    shares = attributes(metric).get(GIVEN_SHARES)
    if shares and len(shares) == world_size and not any(isinstance(value, list) for value in first.values()):
        merged = merge_states(metric, shares)
        if merged.keys() == first.keys() and all(map(_same, merged.values(), first.values())):
            return dict(shares[rank])  # bitwise equal: a sum of floats depends on the order
    return first if rank == 0 else others


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _others_share(metric: Any, name: str, value: Any) -> Any:
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
