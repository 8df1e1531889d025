"""What modules and optimizers consist of. Reads no attribute: of a mirrored object that would wait for steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from raydist.pickling.attribute_table import attributes

__all__ = ["has_load_hooks", "has_plain_state", "held_parameters", "modules_of"]

_LOAD_HOOKS = (
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_SAVE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
)
_METHODS = ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict")
_EXTRA = "get_extra_state"
_TORCHS = ("torch.nn.", "torch.optim.")


def modules_of(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """A module and those in it.

    >>> [type(each).__name__ for each in modules_of(torch.nn.Sequential(torch.nn.Tanh()))]
    ['Sequential', 'Tanh']
    """
    yield module
    for part in attributes(module)["_modules"].values():
        if part is not None:
            yield from modules_of(part)


def held_parameters(obj: Any) -> Iterator[torch.Tensor]:
    """The parameters of a module or an optimizer.

    >>> layer = torch.nn.Linear(2, 1)
    >>> [len(list(held_parameters(each))) for each in (layer, torch.optim.SGD([layer.bias], 0.1))]
    [2, 1]
    """
    if isinstance(obj, torch.nn.Module):
        for part in modules_of(obj):
            yield from (each for each in attributes(part)["_parameters"].values() if each is not None)
    else:
        for group in attributes(obj)["param_groups"]:
            yield from group["params"]


def has_load_hooks(obj: Any) -> bool:
    """Whether the program is to be called when a module or an optimizer is given a state.

    >>> layer = torch.nn.Linear(2, 1)
    >>> _ = layer.register_load_state_dict_post_hook(print)
    >>> has_load_hooks(torch.nn.Sequential(layer)), has_load_hooks(torch.nn.Linear(2, 1))
    (True, False)
    """
    parts = modules_of(obj) if isinstance(obj, torch.nn.Module) else [obj]
    return any(attributes(part).get(name) for part in parts for name in _LOAD_HOOKS)


def has_plain_state(obj: Any) -> bool:
    """Whether the state of a module or an optimizer is its tensors (and options), given and taken as torch does it.

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
    held, cls = attributes(part), type(part)
    if any(held.get(name) for name in _SAVE_HOOKS) or any(name in held for name in (*_METHODS, _EXTRA)):
        return False
    methods = [getattr(cls, name) for name in _METHODS if hasattr(cls, name)]
    extra = getattr(cls, _EXTRA, None)
    return all(each.__module__.startswith(_TORCHS) for each in methods) and extra in (
        None,
        torch.nn.Module.get_extra_state,
    )
