"""Opening of communicators, with a named backend or with the first backend that can serve the group."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from raydist.collectives.base import Backend, Communicator, Declined, Membership
from raydist.collectives.hierarchical import HierarchicalBackend
from raydist.collectives.process_group import GlooBackend, NcclBackend
from raydist.collectives.shared_memory.communicator import SharedMemoryBackend
from raydist.collectives.xla.communicator import XlaBackend
from raydist.core.errors import InvalidArgumentError, UnavailableError

_log = logging.getLogger("raydist")
_told: set[tuple[str, str]] = set()  # logged fallbacks, one message per pair of backends


AUTO = "auto"
"""Name for the first backend that can serve a group."""

BACKENDS: tuple[type[Backend], ...] = (
    SharedMemoryBackend,
    HierarchicalBackend,
    GlooBackend,
    NcclBackend,
    XlaBackend,
)
"""All backends, by priority. A group uses the first backend that serves its device and does not decline the group."""


def backends_for(device: torch.device, name: str = AUTO) -> tuple[Backend, ...]:
    """Return the backends that may serve a group on a device, in the order of trial; one for a name.

    Args:
        device: Device of the group's tensors.
        name: Name of a backend, or "auto".

    Raises:
        InvalidArgumentError: No backend has this name, or the backend does not serve this device.

    >>> [backend.name for backend in backends_for(torch.device("cpu"))]
    ['shm', 'hierarchical', 'gloo']
    >>> [backend.name for backend in backends_for(torch.device("cuda:0"), "nccl")]
    ['nccl']
    """
    named = [backend for backend in BACKENDS if name in (AUTO, backend.name)]
    if not named:
        known = ", ".join(f'"{backend.name}"' for backend in BACKENDS)
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


def open_communicator(
    membership: Membership, *, device: torch.device, timeout_s: float, backend: str = AUTO
) -> Communicator:
    """Join a group and return this rank's communicator.

    Blocking: until every member has joined, at most `timeout_s` seconds.

    Args:
        membership: Membership of this rank, with the address of the group's rendezvous store.
        device: Device of the tensors.
        timeout_s: Limit of every wait of this communicator, joining included.
        backend: Name of the backend, the same on every rank. "auto": NCCL for "cuda:k"; for "cpu" shared memory where
            all members can open one segment, "hierarchical" where several hosts are named, else gloo.

    Raises:
        InvalidArgumentError: The backend does not exist or does not serve the device.
        DeadlineExceededError: A member did not arrive; the message says which.
        UnavailableError: No backend that `backend` allows can serve the group.

    >>> from raydist.collectives.rendezvous import RendezvousStore
    >>> from raydist.core.values import ReduceOp
    >>> with RendezvousStore() as store:
    ...     alone = store.membership("doctest", generation=0, rank=0, world_size=1)
    ...     communicator = open_communicator(alone, device=torch.device("cpu"), timeout_s=10.0)
    ...     tensor = torch.ones(2)
    ...     communicator.all_reduce(tensor, ReduceOp.SUM).wait()
    ...     communicator.close()
    >>> tensor.tolist()
    [1.0, 1.0]
    """
    suited = _suited(backends_for(device, backend), membership)
    for chosen, following in zip(suited, (*suited[1:], None), strict=True):
        try:
            return chosen.open(membership, device, timeout_s)
        except Declined as reason:
            if following is None:
                raise _cannot(chosen, membership, str(reason)) from reason
            if membership.rank == 0 and (chosen.name, following.name) not in _told:
                _told.add((chosen.name, following.name))
                group = _describe(membership)
                _log.warning("%s is carried by %s, not %s: %s.", group, following.name, chosen.name, reason)
    raise AssertionError("the last backend returns or raises")


def _suited(backends: Sequence[Backend], membership: Membership) -> list[Backend]:
    """Return the backends that do not decline the membership."""
    reasons = {backend: backend.declines(membership) for backend in backends}
    suited = [backend for backend, reason in reasons.items() if reason is None]
    if not suited:
        raise _cannot(backends[-1], membership, str(reasons[backends[-1]]))
    return suited


def _describe(membership: Membership) -> str:
    return f"group {membership.group!r}, generation {membership.generation}"


def _cannot(backend: Backend, membership: Membership, reason: str) -> UnavailableError:
    return UnavailableError(
        f"The backend {backend.name!r} cannot carry {_describe(membership)}: {reason}. Use the backend {AUTO!r}."
    )
