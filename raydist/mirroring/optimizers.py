"""What an optimizer and its schedulers tell each other beside the learning rate."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

__all__ = ["note_steps"]


def note_steps(optimizer: torch.optim.Optimizer) -> None:
    """Let `optimizer` note that it has stepped, as every scheduler arranges for on construction.

    A scheduler warns when it steps before its optimizer. Its constructor ran on the driver, the optimizer steps here;
    the note (`_opt_called`) travels back with the control state.
    """
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return
    reference = weakref.ref(optimizer)
    original = type(optimizer).step

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        owner = reference()
        if owner is None:
            raise ReferenceError("The optimizer of this step method is gone.")
        owner._opt_called = True  # type: ignore[attr-defined]
        return original(owner, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
