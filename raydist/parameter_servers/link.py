"""The way from a worker, or from the driver, to one parameter server: what all ways have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from raydist.compat.torch_internals import foreach_copy
from raydist.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from raydist.parameter_servers.requests import Pull, Push, ServerAnswer, ServerRequest

__all__ = ["Awaited", "Into", "ServerDoor", "ServerLink", "fill", "gone", "pulled_by", "too_late"]

Into = Mapping[int, torch.Tensor]
"""By slice number where values are to be copied, in place."""


class Awaited(Protocol):
    """Something that was asked of a server."""

    def answer(self, timeout_s: float) -> tuple[ServerAnswer, Sequence[torch.Tensor]]:
        """What the server says. To be called once.

        The tensors may lie where the link's next answer will: use them before asking again.

        Args:
            timeout_s: How long to wait at most.

        Raises:
            DeadlineExceededError: There is no answer yet.
            UnavailableError: The server is gone.
            Exception: What the server raised.
        """


class ServerLink(Protocol):
    """One end of the way to a server. One request is under way at a time; threads take turns."""

    @property
    def name(self) -> str:
        """The server, for messages."""

    def ask(self, request: ServerRequest, tensors: Sequence[torch.Tensor] = (), into: Into | None = None) -> Awaited:
        """Ask without waiting.

        Args:
            request: What.
            tensors: Of the request: dense, contiguous, on the CPU. They may be written again once this has returned.
            into: Where the values go that a `Pull`, or the `pull` of a `Push`, asks for; the answer has no tensors
                then. Its `version`, and under SyncWithBackups its `step`, are those of the values.
        """

    def close(self) -> None:
        """Let go of everything. May be called twice."""


class ServerDoor(Protocol):
    """What a way to a server is opened with, in the process that will use it. Pickled to there."""

    def open(self) -> ServerLink:
        """The way, ready to be used."""


def pulled_by(request: ServerRequest) -> tuple[int, ...]:
    """The slices whose values the answer to a request has."""
    match request:
        case Pull():
            return request.slices
        case Push():
            return request.pull
        case _:
            return ()


def fill(into: Into, numbers: Sequence[int], values: Sequence[torch.Tensor]) -> None:
    """Copy values that came with an answer to where they were asked for; none came where nothing had changed."""
    if not values:
        return
    if len(values) != len(numbers):
        raise InvalidArgumentError(
            f"raydist bug: an answer must have the values of {len(numbers)} slices, got {len(values)}."
        )
    with torch.no_grad():
        foreach_copy([into[number] for number in numbers], list(values))


def too_late(name: str, timeout_s: float) -> DeadlineExceededError:
    """What is raised where a server does not answer in time."""
    return DeadlineExceededError(
        f"There must be an answer from {name} within {timeout_s:g} s, but there is none. It may be busy or stuck, or "
        "wait for a worker that is slower than consistency allows: look there, or raise Timeouts.collective_s."
    )


def gone(name: str) -> UnavailableError:
    """What is raised where a server's process is gone: what it held is lost."""
    return UnavailableError(
        f"{name} is gone, and with it the variables that it held. Make a new strategy, and restore from your last "
        "checkpoint there.",
        actor=name,
    )
