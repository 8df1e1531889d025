"""Names of parameters in checkpoints, for modules and for optimizers.

`torch.compile(module)` wraps a module in another module, which stores the original as `_orig_mod`. Checkpoints use
the names of the original module, so that they load into compiled and plain modules.

torch numbers the parameters in an optimizer's state. Checkpoints use the name of the parameter in its module instead,
with the name of the module before it if the optimizer has parameters of several modules. A parameter that is in no
module of the checkpoint keeps its number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

_PREFIX = "_orig_mod."


def plain_name(name: str) -> str:
    """Return the name of a parameter in the original, uncompiled module.

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
    """Return True if `torch.compile` wraps the module or one of its submodules."""
    return any(_PREFIX in f"{name}." for name, _ in module.named_modules())


def compiled_names(state: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the entries of a state with plain names as in `here`, the `state_dict()` of a compiled module.

    >>> compiled_names({"weight": 1}, {"_orig_mod.weight": 0})
    {'_orig_mod.weight': 1}
    """
    names = {plain_name(name): name for name in here}
    return {names.get(name, name): value for name, value in state.items()}


GROUPS = "param_groups"
_OTHERS = "optimizer_entries"  # entries of an optimizer's state_dict besides "state" and "param_groups"


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return an optimizer's parameters, in the optimizer's order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def parameter_names(optimizer: torch.optim.Optimizer, modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of an optimizer's parameters, in the optimizer's order.

    >>> model = torch.nn.Linear(2, 1)
    >>> parameter_names(torch.optim.SGD(model.parameters(), 0.1), {"model": model})
    ['weight', 'bias']
    """
    known: dict[int, tuple[str, str]] = {}  # by id of the parameter: names of its module and of the parameter
    for module_name, module in modules.items():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            known.setdefault(id(parameter), (module_name, plain_name(name)))
    parameters = enumerate(parameters_of(optimizer))
    names = [known.get(id(parameter), ("", str(number))) for number, parameter in parameters]
    several = len({module_name for module_name, _ in names}) > 1
    return [f"{module_name}.{name}" if several and module_name else name for module_name, name in names]


def optimizer_entries(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Convert an optimizer's `state_dict()` to a dict with an entry for each parameter, by name, and for the groups.

    >>> optimizer_entries({"state": {0: {"step": 3}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}, ["a", "b"])
    {'a': {'step': 3}, 'param_groups': [{'lr': 0.1, 'params': ['a', 'b']}]}
    """
    entries: dict[str, Any] = {names[number]: entry for number, entry in state["state"].items()}
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state[GROUPS]]
    more = {key: value for key, value in state.items() if key not in ("state", GROUPS)}
    return {**entries, GROUPS: groups, **({_OTHERS: more} if more else {})}


def optimizer_state(entries: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Convert the result of `optimizer_entries` back to a `state_dict()` for parameters with these names.

    Raise KeyError for a name that is not in `names`.


    >>> optimizer_state({"a": {"step": 3}, "param_groups": [{"lr": 0.1, "params": ["a"]}]}, ["a"])
    {'state': {0: {'step': 3}}, 'param_groups': [{'lr': 0.1, 'params': [0]}]}
    """
    numbers = {name: number for number, name in enumerate(names)}
    state = {numbers[name]: entry for name, entry in entries.items() if name not in (GROUPS, _OTHERS)}
    # torch assigns the k-th number of a saved group to the k-th parameter of the current group
    groups = [{**group, "params": sorted(numbers[name] for name in group["params"])} for group in entries[GROUPS]]
    return {"state": dict(sorted(state.items())), GROUPS: groups, **entries.get(_OTHERS, {})}


def fitting_entries(entries: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `here`, each replaced by the saved entry if the parameter was saved.

    >>> saved = {"a": {"step": 3}, "b": {"step": 3}, "param_groups": [{"lr": 0.1, "params": ["a", "b"]}]}
    >>> fitting_entries(saved, {"c": {"step": 1}, "param_groups": [{"lr": 0.2, "params": ["c", "a"]}]})
    {'a': {'step': 3}, 'c': {'step': 1}, 'param_groups': [{'lr': 0.1, 'params': ['c', 'a']}]}
    """
    current, saved_names = (_parameters_of(each) for each in (here, entries))
    states = {name: entries[name] for name in current if name in saved_names and name in entries}
    states |= {name: here[name] for name in current if name not in saved_names and name in here}
    groups = [{**group, "params": list(group["params"])} for group in here[GROUPS]]
    for group, saved in zip(groups, entries[GROUPS], strict=False):
        group.update({key: value for key, value in saved.items() if key != "params"})
    return {**states, GROUPS: groups, **({_OTHERS: entries[_OTHERS]} if _OTHERS in entries else {})}


def keep_types(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Restore the dtypes of the tensors in a state that the optimizer has just loaded.

    torch's `load_state_dict` casts these tensors to the dtype of their parameter. Without this function, an optimizer
    with bfloat16 moments for float32 parameters, or the reverse, would not resume exactly.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> sgd = torch.optim.SGD([weight], momentum=0.9)
    >>> saved = sgd.state_dict() | {"state": {0: {"momentum_buffer": torch.ones(2, dtype=torch.bfloat16)}}}
    >>> sgd.load_state_dict(saved)
    >>> keep_types(sgd, saved)
    >>> sgd.state[weight]["momentum_buffer"].dtype
    torch.bfloat16
    """
    numbers = [number for group in state[GROUPS] for number in group["params"]]
    for number, parameter in zip(numbers, parameters_of(optimizer), strict=False):
        loaded = optimizer.state.get(parameter, {})
        for name, value in state["state"].get(number, {}).items():
            now = loaded.get(name) if name != "step" else None  # leave "step": torch casts it for fused kernels
            if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor) and now.dtype != value.dtype:
                loaded[name] = value.to(now.device, copy=True)


def _parameters_of(entries: Mapping[str, Any]) -> list[str]:
    return [name for group in entries[GROUPS] for name in group["params"]]
