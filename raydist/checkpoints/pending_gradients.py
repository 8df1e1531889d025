"""Gradients that were computed and not used yet, as an object with a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import nn

from raydist.checkpoints.compiled_names import plain_name
from raydist.errors import InvalidArgumentError

__all__ = ["PendingGradients"]


@final
class PendingGradients:
    """The `.grad` of a module's parameters.

    Args:
        module: The module.

    Attributes:
        module: The module.

    >>> model = torch.nn.Linear(1, 1)
    >>> model(torch.ones(1)).backward()
    >>> PendingGradients(model).state_dict()
    {'weight': tensor([[1.]]), 'bias': tensor([1.])}
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the existing gradients by parameter name."""
        named = self.module.named_parameters()
        return {plain_name(name): each.grad for name, each in named if each.grad is not None}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set these gradients and clear all others; raise InvalidArgumentError, unchanged, if one does not fit."""
        parameters = {plain_name(name): each for name, each in self.module.named_parameters()}
        for name, gradient in state.items():
            if name not in parameters or parameters[name].shape != gradient.shape:
                raise InvalidArgumentError(
                    f"A saved gradient must be of a parameter and of its shape, but {name!r} of shape "
                    f"{tuple(gradient.shape)} is not. Restore into a module like the one that was saved."
                )
        for name, parameter in parameters.items():
            found = state.get(name)
            parameter.grad = None if found is None else found.to(parameter.device, parameter.dtype)
