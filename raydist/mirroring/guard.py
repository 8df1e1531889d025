"""A parameter that a step creates in a mirrored module would exist once per replica, unsynchronised: refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from raydist.errors import FailedPreconditionError

__all__ = ["refuse_new_parameters"]


@contextmanager
def refuse_new_parameters(is_mirrored: Callable[[Any], bool]) -> Iterator[None]:
    """Inside the block, mirrored modules take no parameters and no submodules with parameters but mirrored ones.

    Modules that a step makes for itself are its own affair.
    """

    def check(module: torch.nn.Module, name: str, value: Any) -> None:
        if value is None or not is_mirrored(module):
            return
        parameters = [value] if isinstance(value, torch.Tensor) else value.parameters()
        if not all(is_mirrored(parameter) for parameter in parameters):
            raise FailedPreconditionError(
                f"The parameters of a mirrored module must be created under the scope, on the driver; a step "
                f"registered {name!r} in {type(module).__name__}. Create it inside `with strategy.scope():`, outside "
                f"of the step."
            )

    with ExitStack() as stack:
        stack.callback(torch_module.register_module_parameter_registration_hook(check).remove)
        stack.callback(torch_module.register_module_module_registration_hook(check).remove)
        yield
