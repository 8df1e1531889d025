"""Conversion of a model's state to named tensors and a manifest, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from raydist.checkpoints.compiled_names import compiled_names, has_compiled, plain_names
from raydist.checkpoints.optimizer_names import keep_types
from raydist.errors import InvalidArgumentError
from raydist.parameter_servers.rows.saved_rows import SavedRows
from raydist.training.architecture import architecture_of, build_module
from raydist.training.saving import ModelManifest, digests, snapshot

__all__ = ["make_module", "pack", "rebuild", "restore_module", "restore_optimizer"]

MODULE_PREFIX = "module."
OPTIMIZER_PREFIX = "optimizer."


def pack(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, config: Mapping[str, Any] | None
) -> tuple[dict[str, torch.Tensor], ModelManifest]:
    """Return the tensors and manifest that `Model.save` writes. Blocks for dispatched steps."""
    if tables := SavedRows(module).tables():
        raise InvalidArgumentError(
            "A model file has what state_dict() gives, and that has no rows of ShardedEmbeddings, but the module has "
            f"{', '.join(map(repr, tables))}. Save an rd.Checkpoint(model=model.module) instead: it has them."
        )
    state = snapshot(plain_names(module.state_dict()))
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
        architecture=architecture_of(module),
    )
    return tensors, manifest


def _pack_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
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
    """Return the groups' settings; a learning rate in a tensor becomes a number."""
    return [
        {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in group.items()}
        for group in groups
    ]


def restore_module(module: nn.Module, tensors: Mapping[str, torch.Tensor], manifest: ModelManifest) -> None:
    """Load the module's state in place."""
    try:
        state = plain_names({**_of_module(tensors), **manifest.extra})
        module.load_state_dict(compiled_names(state, module.state_dict()) if has_compiled(module) else state)
    except RuntimeError as error:
        raise InvalidArgumentError(
            f"The saved state must fit the module, a {type(module).__name__}: {error} "
            f"The file was saved from {manifest.module_class}; pass such a module: Model.load(path, module=...)."
        ) from None


def _of_module(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(MODULE_PREFIX): value for name, value in tensors.items() if name.startswith(MODULE_PREFIX)
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], manifest: ModelManifest
) -> None:
    """Load the optimizer's state in place, including settings such as the learning rate."""
    saved = manifest.optimizer
    kind = None if saved is None else saved.get("class")
    if saved is None or kind != type(optimizer).__name__:
        held = "none" if saved is None else f"that of {kind}"
        raise InvalidArgumentError(
            f"The file must hold the state of the optimizer to be restored, {type(optimizer).__name__}; it holds "
            f"{held}. Leave `optimizer` out, or compile before saving."
        )
    try:
        state: dict[int, dict[str, Any]] = {int(index): dict(entries) for index, entries in saved["values"].items()}
        for key, value in tensors.items():
            if key.startswith(OPTIMIZER_PREFIX):
                index, _, name = key.removeprefix(OPTIMIZER_PREFIX).partition(".")
                state.setdefault(int(index), {})[name] = value
        loaded = {"state": state, "param_groups": saved["groups"]}
        optimizer.load_state_dict(loaded)
        keep_types(optimizer, loaded)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgumentError(
            f"The saved state must fit the optimizer: {error}. Make it over the same parameters in the same groups."
        ) from None


def rebuild(manifest: ModelManifest, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Build the torch.nn module that the file describes. A file never causes other code to be imported or called.

    Raises:
        InvalidArgumentError: The module is not described.
    """
    architecture = manifest.architecture or _by_config(manifest)
    if architecture is None:
        raise InvalidArgumentError(
            f"Only modules of torch.nn, and its containers of them, are built from what a file says, and this one was "
            f"saved from {manifest.module_class!r:.200}. Pass the module, or what makes it (called with the saved "
            "config): Model.load(path, module=...)."
        )
    return build_module(architecture, _of_module(tensors))


def _by_config(manifest: ModelManifest) -> dict[str, Any] | None:
    """Return the description for files of older versions without one: a single module of torch.nn."""
    place, _, name = str(manifest.module_class).partition(":")
    found = place.startswith("torch.nn.modules.") and manifest.config is not None
    return {"class": name, "arguments": manifest.config} if found else None


def make_module(maker: Any, manifest: ModelManifest) -> nn.Module:
    """Return the user's module, or the result of the user's class or function for the saved config."""
    if isinstance(maker, nn.Module):
        return maker
    if not callable(maker):
        raise InvalidArgumentError(
            f"module must be a torch.nn.Module, or a class or function that makes one, got {maker!r:.200}."
        )
    made = maker(**(manifest.config or {}))
    if not isinstance(made, nn.Module):
        raise InvalidArgumentError(f"module must make a torch.nn.Module, but {maker!r:.200} returned {made!r:.200}.")
    return made
