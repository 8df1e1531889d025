"""The check that an optimizer uses the `step` of its class: a `step` set on the instance is not sent to replicas."""

from __future__ import annotations

import torch

from raydist.compat.torch_internals import is_wrapped_step
from raydist.errors import FailedPreconditionError
from raydist.pickling.attribute_table import attributes

__all__ = ["require_step_of_class"]


def require_step_of_class(optimizer: torch.optim.Optimizer) -> None:
    """Raise if the program has set `step` on an optimizer instance; a learning rate scheduler's wrapper is allowed.

    Raises:
        FailedPreconditionError: The optimizer has another `step`.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)])
    >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    >>> require_step_of_class(optimizer)
    """
    own = attributes(optimizer).get("step")  # of a mirrored one, `vars` would wait for the steps under way
    if own is not None and not is_wrapped_step(own):
        name = type(optimizer).__name__
        raise FailedPreconditionError(
            f"The step of an optimizer must be that of its class, since replicas run that one, but this {name} was "
            f"given another: {own!r:.80}. Use register_step_pre_hook or register_step_post_hook, or derive a class."
        )
