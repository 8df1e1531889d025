"""What an optimizer must be to train a model, and torch's classes by their names."""

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
    """The class that `name` means, in any case and with or without underscores and `suffix`.

    Raises:
        InvalidArgumentError: There is none; shows the nearest, and all.
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
    """The optimizer of torch's that a name means ("adam", "SGD"), over all parameters of `module`, with its defaults.

    Raises:
        InvalidArgumentError: There is none, or `module` has no parameter.
    """
    found = {kind.__name__: kind for kind in vars(torch.optim).values() if _is_optimizer(kind)}
    kind: Any = class_by_name(name, found, "optimizer")
    parameters = list(module.parameters())
    if not parameters:
        raise InvalidArgumentError(f"{name!r} needs parameters to optimise, got a {type(module).__name__} without any.")
    optimizer: torch.optim.Optimizer = kind(parameters)
    return optimizer


def _is_optimizer(kind: Any) -> bool:
    # LBFGS asks for the loss several times a step, which fit does not offer.
    return (
        isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind.__name__ not in ("Optimizer", "LBFGS")
    )


def require_optimizer(optimizer: Any, module: nn.Module, loss: Any) -> None:
    """InvalidArgumentError unless `optimizer` is one of torch's, over parameters of `module` and `loss` alone."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(
            f"optimizer must be a torch.optim.Optimizer, got {optimizer!r}. "
            "Example: torch.optim.SGD(model.parameters(), lr=0.1)."
        )
    known = {id(parameter) for part in (module, loss) if isinstance(part, nn.Module) for parameter in part.parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = [tuple(parameter.shape) for parameter in given if id(parameter) not in known]
    if foreign:
        raise InvalidArgumentError(
            f"The optimizer must hold parameters of the model: {len(foreign)} of its {len(given)} are not among them, "
            f"the first has the shape {foreign[0]}. Make it from model.parameters(), once the module is complete."
        )
