"""Copies from a device to the host that do not block the host."""

from __future__ import annotations

from collections.abc import Callable

import torch


def begin_host_copy(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to copy a tensor to the host; return a function that waits for the copy and returns it.

    From a GPU the copy goes to pinned memory, in the order of the current stream. Elsewhere it is made at once.

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
    arrived = torch.cuda.current_stream(values.device).record_event()

    def wait() -> torch.Tensor:
        arrived.synchronize()
        return host

    return wait
