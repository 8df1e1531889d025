"""The way to a parameter server on another host: one actor call a request, tensors through the object store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from raydist.actors.server_host import PackedTensor
from raydist.actors.supervision import RemoteFailure
from raydist.parameter_servers.link import Awaited, Into, fill, gone, pulled_by, too_late
from raydist.parameter_servers.requests import ServerAnswer, ServerRequest

__all__ = ["RayDoor", "RayLink"]


@final
@dataclass(frozen=True, slots=True)
class RayDoor:
    """Opens a way through Ray.

    Attributes:
        handle: Of the server's actor.
        name: The server, for messages.
        limit_s: How long the server's process may hold a call.
    """

    handle: Any
    name: str
    limit_s: float

    def open(self) -> RayLink:
        """See `ServerDoor`."""
        return RayLink(self.handle, self.name, self.limit_s)


@final
class RayLink:
    """See `RayDoor` for the arguments; any number of threads may share it."""

    def __init__(self, handle: Any, name: str, limit_s: float) -> None:
        self.name = name
        self._handle = handle
        self._limit_s = limit_s

    def ask(self, request: ServerRequest, tensors: Sequence[torch.Tensor] = (), into: Into | None = None) -> Awaited:
        """See `ServerLink`."""
        packed = [PackedTensor.of(tensor) for tensor in tensors]
        try:
            ref = self._handle.ask.remote(request, packed, self._limit_s)
        except RayActorError:
            raise gone(self.name) from None
        return _AskedThere(self.name, ref, pulled_by(request), into)

    def close(self) -> None:
        """See `ServerLink`."""


@final
@dataclass(frozen=True, slots=True)
class _AskedThere:
    name: str
    ref: Any
    numbers: tuple[int, ...]
    into: Into | None

    def answer(self, timeout_s: float) -> tuple[ServerAnswer, Sequence[torch.Tensor]]:
        try:
            answer, packed = ray.get(self.ref, timeout=timeout_s)
        except GetTimeoutError:
            raise too_late(self.name, timeout_s) from None
        except RayActorError:
            raise gone(self.name) from None
        except RayTaskError as error:
            raise _cause_of(error) from None
        tensors = [each.tensor() for each in packed]
        if self.into is None or not self.numbers:
            return answer, tensors
        fill(self.into, self.numbers, tensors)
        return answer, ()


def _cause_of(error: RayTaskError) -> Exception:
    cause = error.cause
    return cause.portable.restore() if isinstance(cause, RemoteFailure) else error
