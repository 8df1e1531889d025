"""Reading and loading the state of each kind of object: modules, optimizers, metrics, and others."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from raydist.checkpoints.compiled_names import compiled_names, has_compiled, plain_names
from raydist.checkpoints.metric_shares import GIVEN_SHARES, metric_shares
from raydist.checkpoints.optimizer_names import (
    fitting_entries,
    keep_types,
    optimizer_entries,
    optimizer_state,
    parameter_names,
)
from raydist.checkpoints.state import State

__all__ = ["SHARES", "class_of_state", "give_state", "kind_of_state", "state_of"]

SHARES = "_shares"
"""Entry of a metric's state with the states of each replica."""

_UPDATES = "_update_count"  # of a torchmetrics metric


def kind_of_state(obj: Any) -> str:
    """Return the kind of an object in a checkpoint: "module", "optimizer", "metric" or "other".

    >>> kind_of_state(torch.nn.Linear(1, 1)), kind_of_state(rd.Mean()), kind_of_state(rd.State())
    ('module', 'metric', 'other')
    """
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is not None and isinstance(obj, torchmetrics.Metric):
        return "metric"
    if isinstance(obj, nn.Module):
        return "module"
    return "optimizer" if isinstance(obj, torch.optim.Optimizer) else "other"


def class_of_state(obj: Any) -> str | None:
    """Return the class name if a state fits its class only (optimizers, schedulers, rd.State); else None."""
    schedulers = (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    return type(obj).__name__ if isinstance(obj, (torch.optim.Optimizer, State, *schedulers)) else None


def state_of(obj: Any, modules: Mapping[str, nn.Module]) -> Any:
    """Return the state of an object, for `pack_state`. Blocks for dispatched steps if the object is mirrored.

    Args:
        obj: One of the checkpoint's objects.
        modules: All modules of the checkpoint: they name the parameters.
    """
    kind = kind_of_state(obj)
    if kind == "optimizer":
        return optimizer_entries(obj.state_dict(), parameter_names(obj, modules))
    if kind == "metric":
        entries = {name: getattr(obj, name) for name in _metric_entries(obj)}
        shares = metric_shares(obj)
        return {**obj.state_dict(), **entries, **({SHARES: shares} if shares else {})}
    return plain_names(obj.state_dict()) if kind == "module" and has_compiled(obj) else obj.state_dict()


def give_state(obj: Any, state: Any, modules: Mapping[str, nn.Module], strict: bool = True) -> None:
    """Load a state into an object.

    Args:
        obj: One of the checkpoint's objects.
        state: Result of `state_of`.
        modules: All modules of the checkpoint.
        strict: Require that a module or an optimizer finds all of its entries, and no others.
    """
    kind = kind_of_state(obj)
    if kind == "optimizer":
        names = parameter_names(obj, modules)
        if not strict:
            state = fitting_entries(state, optimizer_entries(obj.state_dict(), names))
        numbered = optimizer_state(state, names)
        obj.load_state_dict(numbered)
        keep_types(obj, numbered)
    elif kind == "metric":
        _give_metric(obj, state)
    elif kind == "module":
        if has_compiled(obj):
            state = compiled_names(state, obj.state_dict())
        obj.load_state_dict(state, strict=strict)
        for metric in (part for part in obj.modules() if kind_of_state(part) == "metric"):
            metric._computed = None  # a cached result of torchmetrics, computed from the previous states
    else:
        obj.load_state_dict(state)


def _metric_entries(metric: Any) -> tuple[str, ...]:
    """Return the names of a metric's states, which torchmetrics leaves out of state_dict."""
    return (*metric._defaults, *((_UPDATES,) if hasattr(metric, _UPDATES) else ()))


def _give_metric(metric: Any, state: Mapping[str, Any]) -> None:
    own = _metric_entries(metric)
    others = {name: value for name, value in state.items() if name not in (*own, SHARES)}
    metric.load_state_dict(others, strict=False)
    for name in own:
        if name in state:
            value = state[name]
            setattr(metric, name, value.to(metric.device) if isinstance(value, torch.Tensor) else value)
    metric._computed = None
    if SHARES in state:
        setattr(metric, GIVEN_SHARES, list(state[SHARES]))
