"""A model's state as named tensors and a manifest, and back again."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn

from raydist.errors import InvalidArgumentError
from raydist.training.module_recipe import build_module, recipe_of
from raydist.training.saving import ModelManifest, digests, snapshot

__all__ = ["pack", "rebuild", "restore_module", "restore_optimizer"]

MODULE_PREFIX = "module."
OPTIMIZER_PREFIX = "optimizer."


def pack(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, config: Mapping[str, Any] | None
) -> tuple[dict[str, torch.Tensor], ModelManifest]:
    """Everything that `Model.save` writes. Waits for dispatched steps."""
    state = snapshot(module.state_dict())
    tensors = {MODULE_PREFIX + name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    extra = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
    plain = None if optimizer is None else _pack_optimizer(optimizer, tensors)
    kind = type(module)
    manifest = ModelManifest(
        module_class=f"{kind.__module__}:{kind.__qualname__}",
        config=None if config is None else dict(config),
        extra=extra,
        optimizer=plain,
        sha256=digests(tensors),
        recipe=recipe_of(module),
    )
    return tensors, manifest


def _pack_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Put the optimizer's tensors among `tensors`; the rest is returned."""
    state = optimizer.state_dict()
    values: dict[str, dict[str, Any]] = {}
    for index, entries in state["state"].items():
        for name, value in snapshot(entries).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{OPTIMIZER_PREFIX}{index}.{name}"] = value
            else:
                values.setdefault(str(index), {})[name] = value
    return {"class": type(optimizer).__name__, "values": values, "groups": _plain_groups(state["param_groups"])}


def _plain_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Settings of the groups; a learning rate kept in a tensor is saved as a number."""
    return [
        {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in group.items()}
        for group in groups
    ]


def restore_module(module: nn.Module, tensors: Mapping[str, torch.Tensor], manifest: ModelManifest) -> None:
    """Load the module's state in place."""
    try:
        module.load_state_dict({**_module_tensors(tensors), **manifest.extra})
    except RuntimeError as error:
        raise InvalidArgumentError(
            f"The saved state must fit the module, a {type(module).__name__}: {error} "
            f"The file was saved from {manifest.module_class}; pass such a module: Model.load(path, module=...)."
        ) from None


def _module_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(MODULE_PREFIX): value for name, value in tensors.items() if name.startswith(MODULE_PREFIX)
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], manifest: ModelManifest
) -> None:
    """Load the optimizer's state in place, settings such as the learning rate included."""
    saved = manifest.optimizer
    if saved is None or saved["class"] != type(optimizer).__name__:
        held = "none" if saved is None else f"that of {saved['class']}"
        raise InvalidArgumentError(
            f"The file must hold the state of the optimizer to be restored, {type(optimizer).__name__}; it holds "
            f"{held}. Leave `optimizer` out, or compile before saving."
        )
    state: dict[int, dict[str, Any]] = {int(index): dict(entries) for index, entries in saved["values"].items()}
    for key, value in tensors.items():
        if key.startswith(OPTIMIZER_PREFIX):
            index, _, name = key.removeprefix(OPTIMIZER_PREFIX).partition(".")
            state.setdefault(int(index), {})[name] = value
    try:
        optimizer.load_state_dict({"state": state, "param_groups": saved["groups"]})
    except ValueError as error:
        raise InvalidArgumentError(
            f"The saved state must fit the optimizer: {error}. Make it over the same parameters in the same groups."
        ) from None


def rebuild(tensors: Mapping[str, torch.Tensor], manifest: ModelManifest) -> nn.Module:
    """A fresh module: made of torch.nn's, or of the saved class, imported by its name and called with the saved config.

    Only a subclass of `torch.nn.Module` is ever called.
    """
    if manifest.recipe is not None:
        return build_module(manifest.recipe, _module_tensors(tensors))
    kind = _find_class(manifest.module_class)
    config = manifest.config
    if config is None and not _callable_without_arguments(kind):
        raise InvalidArgumentError(
            f"{manifest.module_class} needs constructor arguments, and the file holds none. Pass the module: "
            "Model.load(path, module=...), or save from Model(module, config={...})."
        )
    module: nn.Module = kind(**(config or {}))
    return module


def _find_class(name: str) -> type[nn.Module]:
    place, _, qualified = name.partition(":")
    try:
        found: Any = import_module(place)
        for part in qualified.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise InvalidArgumentError(
            f"The module's class {name} must be importable: {error}. Pass the module: Model.load(path, module=...)."
        ) from None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise InvalidArgumentError(
            f"The file names {name} as the module's class, which is no torch.nn.Module. "
            "Pass the module: Model.load(path, module=...)."
        )
    return found


def _callable_without_arguments(kind: type[nn.Module]) -> bool:
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(p.default is not p.empty or p.kind in optional for p in parameters)
