"""The parts of modules and optimizers, read without attribute access: a mirrored object would wait for steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from raydist.class_memory import remembered_by_class
from raydist.compat.torch_internals import module_table, parameter_table
from raydist.pickling.attribute_table import attributes

__all__ = ["has_load_hooks", "has_plain_state", "held_parameters", "modules_of"]

_EXTRA = "get_extra_state"
_TORCHS = ("torch.nn.", "torch.optim.")


def modules_of(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a module and all modules in it.

    >>> [type(each).__name__ for each in modules_of(torch.nn.Sequential(torch.nn.Tanh()))]
    ['Sequential', 'Tanh']
    """
    yield module
    for part in module_table(module).values():
        if part is not None:
            yield from modules_of(part)


def held_parameters(obj: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters of a module or an optimizer.

    >>> layer = torch.nn.Linear(2, 1)
    >>> [len(list(held_parameters(each))) for each in (layer, torch.optim.SGD([layer.bias], 0.1))]
    [2, 1]
    """
    if isinstance(obj, torch.nn.Module):
        for part in modules_of(obj):
            yield from (each for each in parameter_table(part).values() if each is not None)
    else:
        for group in attributes(obj)["param_groups"]:
            yield from group["params"]


def has_load_hooks(obj: Any) -> bool:
    """Return True if a module or an optimizer has hooks on `load_state_dict`.

    >>> layer = torch.nn.Linear(2, 1)
    >>> _ = layer.register_load_state_dict_post_hook(print)
    >>> has_load_hooks(torch.nn.Sequential(layer)), has_load_hooks(torch.nn.Linear(2, 1))
    (True, False)
    """
    parts = modules_of(obj) if isinstance(obj, torch.nn.Module) else [obj]
    return any(_has_hooks(part, "load_state_dict") for part in parts)


def has_plain_state(obj: Any) -> bool:
    """Return True if a module or optimizer uses torch's own `state_dict` and `load_state_dict`, without hooks.

    >>> class Own(torch.nn.Linear):
    ...     def load_state_dict(self, state, strict=True, assign=False): ...
    >>> has_plain_state(torch.nn.BatchNorm1d(2)), has_plain_state(torch.nn.Sequential(Own(1, 1)))
    (True, False)
    """
    if has_load_hooks(obj):
        return False
    parts = list(modules_of(obj)) if isinstance(obj, torch.nn.Module) else [obj]
    return all(map(_is_plain, parts))


def _is_plain(part: Any) -> bool:
    held = attributes(part)
    if _has_hooks(part, "state_dict") or _EXTRA in held:
        return False
    return not any("state_dict" in name and callable(each) for name, each in held.items()) and _has_torchs(type(part))


def _has_hooks(part: Any, kind: str) -> bool:
    """Return True if a module or an optimizer has hooks of a kind."""
    return any(value for name, value in attributes(part).items() if kind in name and name.endswith("hooks"))


@remembered_by_class
def _has_torchs(cls: Any) -> bool:
    """Return True if the `state_dict` methods of a class are torch's own."""
    methods = [getattr(cls, name) for name in dir(cls) if "state_dict" in name]
    own = [each for each in methods if callable(each) and not each.__module__.startswith(_TORCHS)]
    return not own and getattr(cls, _EXTRA, None) in (None, torch.nn.Module.get_extra_state)
