"""What an optimizer must be to train a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from raydist.errors import InvalidArgumentError

__all__ = ["require_optimizer"]


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
