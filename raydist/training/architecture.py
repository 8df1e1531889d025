"""JSON descriptions of `torch.nn` modules and containers of them, from which a file can rebuild a module safely.

A description can only name classes that `torch.nn` itself exports, and nothing is imported. The module is first built
on the device "meta", without memory. It must have exactly the tensors of the file, so that a file cannot request more
memory than it fills.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from raydist.compat.torch_internals import module_table
from raydist.core.errors import InvalidArgumentError
from raydist.mirroring.aggregation import is_chosen_for

Architecture = dict[str, Any]
"""JSON: {"class": name, "arguments": {...}, "dtype": name}, or {"class": name, "children": [[name, ...], ...]}."""

_CONTAINERS: dict[str, type[nn.Module]] = {
    "ModuleDict": nn.ModuleDict,
    "ModuleList": nn.ModuleList,
    "Sequential": nn.Sequential,
}
_MAX_DEPTH = 50
_PLACEMENT_ARGUMENTS = ("device", "dtype")
_RECURRENT_ARGUMENTS = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")
_RECURRENT: dict[type[nn.Module], tuple[str, ...]] = {
    nn.RNN: (*_RECURRENT_ARGUMENTS, "nonlinearity"),
    nn.GRU: _RECURRENT_ARGUMENTS,
    nn.LSTM: (*_RECURRENT_ARGUMENTS, "proj_size"),
}
_MAX_LAYERS = 1000
_JSON_TYPES = (bool, int, float, str, type(None))


def architecture_of(module: nn.Module) -> Architecture | None:
    """Return a description from which a module can be rebuilt; None if the module cannot be described."""
    found = None if _has_duplicate_names(module) else _describe(module, 0)
    if found is None:
        return None
    try:
        built = _build(found, "meta")
    except (TypeError, ValueError, RuntimeError, AttributeError, InvalidArgumentError):
        return None
    same = repr(built) == repr(module) and _shapes(built.state_dict()) == _shapes(module.state_dict())
    return found if same else None


def _has_duplicate_names(module: nn.Module) -> bool:
    """Return True if a submodule, parameter or buffer has two names. A rebuilt module would have two copies of it."""
    return any(
        len(list(named())) < len(list(named(remove_duplicate=False)))
        for named in (module.named_modules, module.named_parameters, module.named_buffers)
    )


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None
        for name, value in state.items()
    }


def _describe(module: nn.Module, depth: int) -> Architecture | None:
    kind = module.__class__  # the type of a mirrored module is a subclass
    name = kind.__name__
    if (
        depth > _MAX_DEPTH
        or (_CONTAINERS.get(name) or _leaf_classes().get(name)) is not kind
        or _has_own_behaviour(module)
    ):
        return None
    if name not in _CONTAINERS:
        return _describe_leaf(module)
    children = [[key, _describe(child, depth + 1)] for key, child in module.named_children()]
    known = all(child is not None for _, child in children) and len(children) == len(module_table(module))
    return {"class": name, "children": children} if known else None


def _has_own_behaviour(module: nn.Module) -> bool:
    """Return True if the module behaves differently from its class, for example because of a hook."""
    held = vars(module)
    has_hooks = any(value for name, value in held.items() if name.endswith("_hooks"))
    return "forward" in held or is_chosen_for(module) or has_hooks


def _describe_leaf(module: nn.Module) -> Architecture | None:
    arguments: dict[str, Any] = {}
    for name, parameter in _parameters_of(module.__class__).items():
        if not hasattr(module, name) and parameter.default is inspect.Parameter.empty:
            return None
        value = getattr(module, name, parameter.default)
        if isinstance(value, torch.Tensor) or (name == "bias" and value is None):
            value = value is not None  # the constructor takes a bool for `bias`
        if not _is_json_value(value):
            return None
        arguments[name] = list(value) if isinstance(value, tuple) else value
    dtypes = {one.dtype for one in (*module.parameters(), *module.buffers()) if one.is_floating_point()}
    if len(dtypes) > 1:
        return None
    dtype = {"dtype": str(next(iter(dtypes))).removeprefix("torch.")} if dtypes else {}
    return {"class": module.__class__.__name__, "arguments": arguments, **dtype}


def _is_json_value(value: Any) -> bool:
    return isinstance(value, _JSON_TYPES) or (
        isinstance(value, tuple) and all(isinstance(one, _JSON_TYPES) for one in value)
    )


def _parameters_of(kind: type[nn.Module]) -> dict[str, inspect.Parameter]:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if kind in _RECURRENT:  # their signatures are (*args, **kwargs)
        return {name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in _RECURRENT[kind]}
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    return {one.name: one for one in parameters if one.name not in _PLACEMENT_ARGUMENTS and one.kind not in variable}


@cache
def _leaf_classes() -> dict[str, type[nn.Module]]:
    return {
        name: kind
        for name, kind in vars(nn).items()
        if isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__.startswith("torch.nn.modules.")
        if kind.__name__ == name and kind is not nn.Module and "Lazy" not in name and name not in _CONTAINERS
    }


def build_module(architecture: Any, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Build a module from a description of `architecture_of`. It must fit the names, shapes and dtypes of `tensors`.

    Raises:
        InvalidArgumentError: The description is invalid, or does not match `tensors`.
    """
    try:
        on_meta = _build(architecture, "meta")
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError, OverflowError) as error:
        raise InvalidArgumentError(
            f"The file must describe a module of torch.nn, but building the module fails: {error!s:.300}. Pass the "
            "module: Model.load(path, module=...)."
        ) from error
    if _shapes(on_meta.state_dict()) != _shapes(tensors):
        raise InvalidArgumentError(
            f"The file must describe the module whose tensors it holds, but {on_meta.__class__.__name__} has tensors "
            "of other names, shapes or dtypes. Pass the module: Model.load(path, module=...)."
        )
    return _build(architecture, None)


def _build(architecture: Any, device: str | None, depth: int = 0) -> nn.Module:
    name = architecture["class"]
    if depth > _MAX_DEPTH:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
    if name in _CONTAINERS:
        container = _CONTAINERS[name]()
        for key, child in architecture["children"]:
            container.add_module(key, _build(child, device, depth + 1))
        return container
    if name not in _leaf_classes():
        raise ValueError(f"{name!r:.100} is not a class of torch.nn that a file may name")
    kind = _leaf_classes()[name]
    known = _parameters_of(kind)
    arguments: dict[str, Any] = {
        key: tuple(one) if isinstance(one, list) else one for key, one in architecture["arguments"].items()
    }
    if not (arguments.keys() <= known.keys() and all(map(_is_json_value, arguments.values()))):
        raise ValueError(f"{name} has no such arguments: {arguments!r:.200}")
    layers = arguments.get("num_layers", 1)
    if not isinstance(layers, int) or layers > _MAX_LAYERS:
        raise ValueError(f"{name} may have at most {_MAX_LAYERS} layers, got num_layers={layers!r:.20}")
    with torch.device(device) if device else torch.device("cpu"):
        module = kind(**arguments)
    dtype = architecture.get("dtype")
    return module.to(_floating_dtype(dtype)) if dtype is not None else module


def _floating_dtype(name: Any) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"{name!r:.100} is not a floating-point dtype")
    return found
