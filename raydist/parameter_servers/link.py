"""The interface of connections from a worker, or from the driver, to one parameter server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from raydist.compat.torch_internals import foreach_copy
from raydist.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from raydist.parameter_servers.requests import Pull, Push, ServerAnswer, ServerRequest

__all__ = ["Awaited", "Into", "ServerDoor", "ServerLink", "fill", "gone", "pulled_by", "too_late"]

Into = Mapping[int, torch.Tensor]
"""By slice number the tensors into which values are copied, in place."""


class Awaited(Protocol):
    """A pending request to a server."""

    def answer(self, timeout_s: float) -> tuple[ServerAnswer, Sequence[torch.Tensor]]:
        """Block until the server answers, and return the answer. To be called once.

        The link's next answer may overwrite the tensors: use them before the next request.

        Args:
            timeout_s: Time limit.

        Raises:
            DeadlineExceededError: The server has not answered in time.
            UnavailableError: The server is gone.
            Exception: The error that the server raised.
        """


class ServerLink(Protocol):
    """A connection to a server. One request is under way at a time; threads take turns."""

    @property
    def name(self) -> str:
        """Name of the server, for messages."""

    def ask(self, request: ServerRequest, tensors: Sequence[torch.Tensor] = (), into: Into | None = None) -> Awaited:
        """Send a request without waiting for the answer.

        Args:
            request: The request.
            tensors: The request's tensors: dense, contiguous, on the CPU. The caller may overwrite them afterwards.
            into: Targets of the values that a `Pull`, or the `pull` of a `Push`, requests; the answer has no tensors
                then. Its `version`, and under SyncWithBackups its `step`, are those of the values.
        """

    def close(self) -> None:
        """Release all resources. May be called twice."""


class ServerDoor(Protocol):
    """A pickled opener of a connection, for the process that will use the connection."""

    def open(self) -> ServerLink:
        """Open the connection."""


def pulled_by(request: ServerRequest) -> tuple[int, ...]:
    """Return the slices whose values the answer to a request contains."""
    match request:
        case Pull():
            return request.slices
        case Push():
            return request.pull
        case _:
            return ()


def fill(into: Into, numbers: Sequence[int], values: Sequence[torch.Tensor]) -> None:
    """Copy an answer's values to their targets; does nothing for an answer without values (nothing had changed)."""
    if not values:
        return
    if len(values) != len(numbers):
        raise InvalidArgumentError(
            f"raydist bug: an answer must have the values of {len(numbers)} slices, got {len(values)}."
        )
    with torch.no_grad():
        foreach_copy([into[number] for number in numbers], list(values))


def too_late(name: str, timeout_s: float) -> DeadlineExceededError:
    """Return the error for a server that does not answer in time."""
    return DeadlineExceededError(
        f"There must be an answer from {name} within {timeout_s:g} s, but there is none. It may be busy or stuck, or "
        "wait for a worker that is slower than consistency allows: look there, or raise Timeouts.collective_s."
    )


def gone(name: str) -> UnavailableError:
    """Return the error for a server whose process is gone: its values are lost."""
    return UnavailableError(
        f"{name} is gone, and with it the variables that it held. Make a new strategy, and restore from your last "
        "checkpoint there.",
        actor=name,
    )
