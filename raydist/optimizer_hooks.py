"""What torch does around each step of an optimizer, and when it can be left out.

torch names the step for its profiler and calls the hooks that a program has registered. Where there are neither, that
is 9 us of the 46 that SGD with momentum takes for six small tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.optim import optimizer as torch_optimizer

__all__ = ["clear_gradients", "is_unobserved", "unobserved_step"]

_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled


def is_unobserved(optimizer: torch.optim.Optimizer) -> bool:
    """Whether nobody looks at its steps: no hook before or after them, no profiler, no compiler.

    >>> sgd = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    >>> handle = sgd.register_step_post_hook(lambda *told: None)
    >>> is_unobserved(sgd)
    False
    """
    return not (
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or _profiled()
        or torch.compiler.is_compiling()
    )


def unobserved_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The step of a class without what torch puts around it; as it is, where that is nothing.

    >>> parameter = torch.zeros(1)
    >>> parameter.grad = torch.ones(1)
    >>> unobserved_step(torch.optim.SGD)(torch.optim.SGD([parameter], lr=0.5))
    >>> parameter
    tensor([-0.5000])
    """
    step: Any = kind.step
    return cast(Callable[..., Any], step.__wrapped__ if getattr(step, "hooked", False) else step)


def clear_gradients(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
    """Torch's own `zero_grad`, without a name for the profiler where none runs: that is 9 us.

    >>> parameter = torch.zeros(1)
    >>> parameter.grad = torch.ones(1)
    >>> clear_gradients(torch.optim.SGD([parameter], lr=0.5))
    >>> parameter.grad is None
    True
    """
    if not set_to_none or _profiled() or torch.compiler.is_compiling():
        torch.optim.Optimizer.zero_grad(optimizer, set_to_none)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad = None
