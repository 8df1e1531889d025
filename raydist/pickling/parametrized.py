"""Modules under `torch.nn.utils.parametrize` (weight_norm, spectral_norm, ...).

A parametrized module has a class of its own, made at run time, whose properties compute the tensors; torch refuses to
pickle it. All that the class says is in the module's `parametrizations`, from which it can be made again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.utils import parametrize

from raydist.pickling.attribute_table import attributes

__all__ = ["match_class", "reduce_parametrized"]


def reduce_parametrized(module: Any) -> tuple[Any, ...] | None:
    """The pickle reduction of a parametrized module, None for anything else."""
    if not isinstance(module, torch.nn.Module) or not _names(module):
        return None
    return _new, (parametrize.type_before_parametrizations(module),), attributes(module), None, None, _set_state


def match_class(module: torch.nn.Module) -> None:
    """Give a module the class that its `parametrizations` ask for, after they may have changed."""
    names = _names(module)
    # As torch sees it: the class of a mirrored module is a subclass that hides behind the one its author wrote.
    if not names and _is_injected(module.__class__):
        module.__class__ = module.__class__.__bases__[0]
    if names and not _is_injected(module.__class__):
        parametrize._inject_new_class(module)
    for name in names:
        if not isinstance(vars(module.__class__).get(name), property):
            parametrize._inject_property(module, name)


def _names(module: torch.nn.Module) -> list[str]:
    held = attributes(module).get("_modules", {}).get("parametrizations")
    return [] if held is None else list(attributes(held)["_modules"])


def _is_injected(cls: type) -> bool:
    return cls.__name__.startswith("Parametrized") and "__getstate__" in vars(cls)


def _new(cls: type[torch.nn.Module]) -> torch.nn.Module:
    return cls.__new__(cls)


def _set_state(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    attributes(module).update(state)
    match_class(module)
