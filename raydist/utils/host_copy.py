"""Asynchronous copies from a GPU to the host."""

from __future__ import annotations

from collections.abc import Callable

import torch


def begin_host_copy(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start to copy a tensor to the host, and return a function that waits for the copy and returns the copied tensor.

    A copy from a GPU runs on the current stream, into pinned memory. Other devices are copied before the call returns.

    >>> read = begin_host_copy(torch.ones(2))
    >>> read()
    tensor([1., 1.])
    """
    values = tensor.detach()
    if not values.is_cuda or values.layout is not torch.strided:
        copied = values.cpu()
        return lambda: copied
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied_event = torch.cuda.current_stream(values.device).record_event()

    def wait() -> torch.Tensor:
        copied_event.synchronize()
        return host

    return wait
