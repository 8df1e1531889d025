"""The table of backends: what carries a group's data, by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raydist.collectives.backend import Backend
from raydist.collectives.gloo import GlooBackend
from raydist.collectives.hierarchical import HierarchicalBackend
from raydist.collectives.nccl import NcclBackend
from raydist.collectives.shared_memory.communicator import SharedMemoryBackend
from raydist.collectives.xla.communicator import XlaBackend
from raydist.errors import InvalidArgumentError

__all__ = ["AUTO", "BACKENDS", "backends_for"]

AUTO = "auto"
"""The name that stands for the first backend that can carry a group."""

BACKENDS: tuple[type[Backend], ...] = (
    SharedMemoryBackend,
    HierarchicalBackend,
    GlooBackend,
    NcclBackend,
    XlaBackend,
)
"""All of them. Several may serve one kind of device: the first of those that does not decline a group carries it."""


def backends_for(
    device: torch.device, name: str = AUTO, *, backends: Sequence[type[Backend]] = BACKENDS
) -> tuple[Backend, ...]:
    """What may carry a group on a device, in the order in which it is tried: one backend where it is called by name.

    Args:
        device: Where the group's tensors are.
        name: Of a backend of the table, or "auto".
        backends: The table.

    Raises:
        InvalidArgumentError: No backend has this name, or it does not serve this device.

    >>> [backend.name for backend in backends_for(torch.device("cpu"))]
    ['shm', 'hierarchical', 'gloo']
    >>> [backend.name for backend in backends_for(torch.device("cuda:0"), "nccl")]
    ['nccl']
    """
    named = [backend for backend in backends if name in (AUTO, backend.name)]
    if not named:
        known = ", ".join(f'"{backend.name}"' for backend in backends)
        raise InvalidArgumentError(f'A collective backend must be "{AUTO}" or one of {known}, got {name!r}.')
    serving = tuple(backend() for backend in named if device.type in backend.devices)
    if not serving:
        served = ", ".join(dict.fromkeys(kind for backend in named for kind in backend.devices))
        with_backend = "" if name == AUTO else f" with the backend {name!r}"
        raise InvalidArgumentError(
            f"A group{with_backend} must be on one of {served}, got device {device}. Let raydist choose what serves "
            f'it: "{AUTO}" (CommunicationOptions.implementation), and no cross_device_ops that is for others.'
        )
    return serving
