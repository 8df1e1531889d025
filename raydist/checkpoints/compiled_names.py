"""Parameter names without the prefix of `torch.compile`.

`torch.compile(module)` wraps a module in another module, which stores the original as `_orig_mod`. Checkpoints use
the names of the original module, so that they load into compiled and plain modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

__all__ = ["compiled_names", "has_compiled", "plain_name", "plain_names"]

_PREFIX = "_orig_mod."


def plain_name(name: str) -> str:
    """Return the name that a parameter has without `torch.compile`.

    >>> plain_name("_orig_mod.0.weight"), plain_name("block._orig_mod.weight")
    ('0.weight', 'block.weight')
    """
    return name.replace(_PREFIX, "")


def plain_names(state: Any) -> Any:
    """Return the state of a module or an optimizer with plain names; the same object if all names are plain.

    >>> plain_names({"_orig_mod.weight": 1, "param_groups": [{"params": ["_orig_mod.weight"]}]})
    {'weight': 1, 'param_groups': [{'params': ['weight']}]}
    """
    if not isinstance(state, Mapping):
        return state
    plain = {plain_name(key) if isinstance(key, str) else key: value for key, value in state.items()}
    groups = state.get("param_groups")
    if isinstance(groups, list) and any(_PREFIX in str(group) for group in groups):
        plain["param_groups"] = [
            {**group, "params": [plain_name(each) for each in group["params"]]} for group in groups
        ]
        return plain
    return plain if plain.keys() != state.keys() else state


def has_compiled(module: nn.Module) -> bool:
    """Return True if the module or a part of it is wrapped by `torch.compile`."""
    return any(_PREFIX in f"{name}." for name, _ in module.named_modules())


def compiled_names(state: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with plain names, renamed for a module that is or contains a compiled module.

    Args:
        state: The state, with plain names.
        here: The `state_dict()` of the module that takes the state.

    >>> compiled_names({"weight": 1}, {"_orig_mod.weight": 0})
    {'_orig_mod.weight': 1}
    """
    names = {plain_name(name): name for name in here}
    return {names.get(name, name): value for name, value in state.items()}
