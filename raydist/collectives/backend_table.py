"""The table of backends: what carries a group's data, by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raydist.collectives.backend import Backend
from raydist.collectives.gloo import GlooBackend
from raydist.collectives.nccl import NcclBackend
from raydist.errors import InvalidArgumentError

__all__ = ["AUTO", "BACKENDS", "backend_for"]

AUTO = "auto"
"""The name that stands for a device's default."""

BACKENDS: tuple[type[Backend], ...] = (
    GlooBackend,
    NcclBackend,
)
"""All of them. Several may serve one kind of device: the first that does is its default."""


def backend_for(device: torch.device, name: str = AUTO, *, backends: Sequence[type[Backend]] = BACKENDS) -> Backend:
    """The backend called `name` for a device; "auto" takes the device's default.

    Args:
        device: Where the group's tensors are.
        name: Of a backend of the table, or "auto".
        backends: The table.

    Raises:
        InvalidArgumentError: No backend has this name, or it does not serve this device.

    >>> backend_for(torch.device("cpu")).name, backend_for(torch.device("cuda:0"), "nccl").name
    ('gloo', 'nccl')
    """
    named = [backend for backend in backends if name in (AUTO, backend.name)]
    if not named:
        known = ", ".join(f'"{backend.name}"' for backend in backends)
        raise InvalidArgumentError(f'A collective backend must be "{AUTO}" or one of {known}, got {name!r}.')
    for backend in named:
        if device.type in backend.devices:
            return backend()
    served = ", ".join(dict.fromkeys(kind for backend in named for kind in backend.devices))
    with_backend = "" if name == AUTO else f" with the backend {name!r}"
    raise InvalidArgumentError(f"A group{with_backend} must be on one of {served}, got device {device}.")
