"""States of torchmetrics metrics: each replica accumulates its own, the driver reads them merged.

They are merged as torchmetrics merges ranks, by each state's `dist_reduce_fx`. What the driver writes must merge to the
written value again: a sum or a list goes to the first replica, with the others at their defaults, and anything else
(a maximum, a mean) to all. Which of the two a function of the metric's author needs is tried out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from raydist.mirroring.kinds import is_metric
from raydist.pickling.attribute_table import attributes

__all__ = ["divide_states", "hold_states", "merge_states", "restore_states", "state_names"]

States = dict[str, Any]


def state_names(obj: Any) -> tuple[str, ...]:
    """Names of the states of a metric, empty for everything that is none."""
    return tuple(attributes(obj)["_defaults"]) if _may_hold_states(obj) else ()


def _may_hold_states(obj: Any) -> bool:
    return isinstance(obj, torch.nn.Module) and is_metric(obj)


def hold_states(metric: Any) -> States:
    """A copy of a metric's states (updates replace tensors or add to them in place)."""
    held = attributes(metric)
    return {name: _copy(held[name]) for name in state_names(metric)}


def restore_states(metric: Any, states: States) -> None:
    """Give a metric copies of these states; a cached result is dropped."""
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
    return [_copy(item, device) for item in value]


def merge_states(metric: Any, per_replica: Sequence[States]) -> States:
    """One metric's states over all replicas."""
    reductions: dict[str, Callable[[Any], Any] | None] = attributes(metric)["_reductions"]
    return {
        name: _merge([states[name] for states in per_replica], reductions.get(name)) for name in state_names(metric)
    }


def _merge(values: list[Any], reduction: Callable[[Any], Any] | None) -> Any:
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    if len(values) == 1:
        return values[0]
    if reduction is not None and getattr(reduction, "__name__", "") == "dim_zero_cat":
        return torch.cat([value.reshape(1) if value.dim() == 0 else value for value in values])
    stacked = torch.stack(values)
    return stacked if reduction is None else reduction(stacked)


def divide_states(metric: Any) -> tuple[States, States]:
    """What the first replica and the others must hold so that together they merge to the metric's present states."""
    held = attributes(metric)
    first = {name: _copy(held[name]) for name in state_names(metric)}
    others = {name: _others_share(metric, name, value) for name, value in first.items()}
    return first, others


def _others_share(metric: Any, name: str, value: Any) -> Any:
    default = attributes(metric)["_defaults"][name]
    return _copy(default if _adds_up(attributes(metric)["_reductions"].get(name), value, default) else value)


def _adds_up(reduction: Callable[[Any], Any] | None, value: Any, default: Any) -> bool:
    """Whether `value` on one replica and defaults on the others merge to `value`; else it must be on all of them."""
    kind = getattr(reduction, "__name__", "")
    if isinstance(value, list) or reduction is None or kind in ("dim_zero_sum", "dim_zero_cat"):
        return True
    if kind in ("dim_zero_mean", "dim_zero_max", "dim_zero_min"):
        return False
    # A function of the metric's author: what it does shows.
    merged = reduction(torch.stack([value, _copy(default, value.device)]))
    return isinstance(merged, torch.Tensor) and merged.shape == value.shape and bool(torch.equal(merged, value))
