"""Private names of torch, each with its reason. Other modules of the package use public names only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["StorageWeakRef", "is_profiled", "views_like", "without_view_tracking"]

# torch's stubs do not know their members.
_KEY: Any = torch._C.DispatchKey
_KEYS: Any = torch._C.DispatchKeySet
_WITHOUT_AUTOGRAD: Any = torch._C._ExcludeDispatchKeyGuard
_AUTOGRAD = _KEYS(_KEY.ADInplaceOrView) | _KEYS(_KEY.AutogradCPU) | _KEYS(_KEY.AutogradCUDA)


def without_view_tracking() -> Any:
    """Return a context manager in which autograd does not note that a view is one.

    Without it `.grad.detach_()`, which `zero_grad(set_to_none=False)` calls, is an error on a view.
    """
    return _WITHOUT_AUTOGRAD(_AUTOGRAD)


def views_like(flat: torch.Tensor, others: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return views of a flat tensor with the shapes of others: one call (0.3 us a view, by `Tensor.view` 3 us)."""
    views: Sequence[torch.Tensor] = torch._C._nn.unflatten_dense_tensors(flat, others)
    return views


is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Return True while torch.profiler writes a trace: entering a `record_function` costs 5 us also where nobody traces."""
