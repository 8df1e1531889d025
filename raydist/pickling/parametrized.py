"""Modules under `torch.nn.utils.parametrize` (weight_norm, spectral_norm, ...).

A parametrized module has a class made at run time, whose properties compute the tensors; torch refuses to pickle it.
The replica makes the class again from the module's `parametrizations`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils import parametrize

from raydist.compat.torch_internals import module_table
from raydist.pickling.attribute_table import attributes

__all__ = ["match_class", "reduce_parametrized"]


def reduce_parametrized(module: Any) -> tuple[Any, ...] | None:
    """Return the pickle reduction of a parametrized module, None for other objects."""
    if not isinstance(module, torch.nn.Module) or not _names(module):
        return None
    return _new, (parametrize.type_before_parametrizations(module),), attributes(module), None, None, _set_state


def match_class(module: torch.nn.Module) -> None:
    """Give a module the class that fits its `parametrizations`, which may have changed."""
    # `__class__` instead of type(): the type of a mirrored module is a subclass of the class to compare.
    cls, names = module.__class__, _names(module)
    plain = cls.__bases__[0] if _is_injected(cls) else cls
    if not names and plain is not cls:
        module.__class__ = plain
    elif any(not isinstance(vars(cls).get(name), property) for name in names):
        module.__class__ = _parametrized_class(plain, names)


def _parametrized_class(cls: type[torch.nn.Module], names: Sequence[str]) -> type[torch.nn.Module]:
    """Return a parametrized class, which torch makes for a temporary module."""
    shell = _new(cls)
    torch.nn.Module.__init__(shell)
    for name in names:
        torch.nn.Module.register_parameter(shell, name, torch.nn.Parameter(torch.empty(0)))
        parametrize.register_parametrization(shell, name, torch.nn.Identity(), unsafe=True)
    return shell.__class__


def _names(module: torch.nn.Module) -> list[str]:
    held = module_table(module).get("parametrizations")
    return [] if held is None else list(module_table(held))


def _is_injected(cls: type) -> bool:
    return cls.__name__.startswith("Parametrized") and "__getstate__" in vars(cls)


def _new(cls: type[torch.nn.Module]) -> torch.nn.Module:
    return cls.__new__(cls)


def _set_state(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    attributes(module).update(state)
    match_class(module)
