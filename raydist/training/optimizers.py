"""Checks of a model's optimizer, and torch classes by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from raydist.errors import InvalidArgumentError

__all__ = ["class_by_name", "optimizer_by_name", "require_optimizer"]

_Class = TypeVar("_Class", bound=type)


def class_by_name(name: str, classes: Mapping[str, _Class], what: str, suffix: str = "") -> _Class:
    """Return the class of a name, in any case and with or without underscores and `suffix`.

    Raises:
        InvalidArgumentError: The name is unknown; the message shows the nearest name, and all.
    """
    plain = {_plain(known): found for known, found in classes.items()}
    for wanted in (_plain(name), _plain(name + suffix)):
        if wanted in plain:
            return plain[wanted]
    near = difflib.get_close_matches(_plain(name + suffix), plain, n=1)
    hint = f" Did you mean {plain[near[0]].__name__!r}?" if near else ""
    raise InvalidArgumentError(
        f"{what} must be one of torch's classes by its name, or made by you, got {name!r}.{hint} There are: "
        f"{', '.join(sorted(classes))}."
    )


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


def optimizer_by_name(name: str, module: nn.Module) -> torch.optim.Optimizer:
    """Return the torch optimizer of a name ("adam", "SGD"), over all parameters of `module`, with its defaults.

    Raises:
        InvalidArgumentError: The name is unknown, or `module` has no parameter.
    """
    found = {kind.__name__: kind for kind in vars(torch.optim).values() if _is_optimizer(kind)}
    kind: Any = class_by_name(name, found, "optimizer")
    _require_steps_alone(kind)
    named = dict(module.named_parameters())
    if not named:
        raise InvalidArgumentError(f"{name!r} needs parameters to optimise, got a {type(module).__name__} without any.")
    _require_suited(kind, module, named)
    optimizer: torch.optim.Optimizer = kind(list(named.values()))
    return optimizer


def _is_optimizer(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer


def _require_steps_alone(kind: type) -> None:
    if issubclass(kind, torch.optim.LBFGS):
        raise InvalidArgumentError(
            "fit needs an optimizer that steps once for each batch, got LBFGS, which asks for the loss several times a "
            'step. Use another one ("adamw"), or a loop of your own with optimizer.step(closure) in strategy.run.'
        )


def _require_suited(kind: type, module: nn.Module, named: Mapping[str, torch.Tensor]) -> None:
    """Raise InvalidArgumentError for parameters that a torch optimizer does not support."""
    if kind is torch.optim.Muon:
        others = [f"{name} {tuple(each.shape)}" for name, each in named.items() if each.ndim != 2]
        what = "matrices, parameters of two dimensions,"
    elif kind is torch.optim.SparseAdam:
        tables = (part for part in module.modules() if getattr(part, "sparse", False))
        sparse = {id(parameter) for part in tables for parameter in part.parameters(recurse=False)}
        others = [f"{name} {tuple(each.shape)}" for name, each in named.items() if id(each) not in sparse]
        what = "parameters with sparse gradients, as of Embedding(sparse=True),"
    else:
        return
    if others:
        shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise InvalidArgumentError(
            f"torch.optim.{kind.__name__} takes {what} only, got {len(others)} others of {len(named)}: {shown}. Use "
            f'"adamw" for all, or freeze the others and give torch.optim.{kind.__name__}([the rest]) to compile.'
        )


def require_optimizer(optimizer: Any, module: nn.Module, loss: Any) -> None:
    """Raise InvalidArgumentError unless `optimizer` is a torch optimizer over parameters of `module` and `loss`."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(
            f"optimizer must be a torch.optim.Optimizer, got {optimizer!r}. "
            "Example: torch.optim.SGD(model.parameters(), lr=0.1)."
        )
    _require_steps_alone(type(optimizer))
    known = {id(parameter) for part in (module, loss) if isinstance(part, nn.Module) for parameter in part.parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = [tuple(parameter.shape) for parameter in given if id(parameter) not in known]
    if foreign:
        raise InvalidArgumentError(
            f"The optimizer must hold parameters of the model: {len(foreign)} of its {len(given)} are not among them, "
            f"the first has the shape {foreign[0]}. Make it from model.parameters(), once the module is complete."
        )
