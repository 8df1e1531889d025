"""The dispatcher of one server's requests: routes each answer to its sender, also answers that must wait for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch

from raydist.parameter_servers.requests import ServerAnswer, ServerRequest

__all__ = ["Outcome", "RequestHandler", "ServerDesk", "Tell"]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The result of a request: an answer or an error.

    Attributes:
        answer: The server's answer.
        tensors: Tensors of the answer: they may be the server's own, which the next request changes.
        error: The error that the server raised instead.
    """

    answer: ServerAnswer
    tensors: Sequence[torch.Tensor] = ()
    error: BaseException | None = None


Tell = Callable[[Outcome], None]


class RequestHandler(Protocol):
    """The part of `ParameterServer` that the dispatcher uses."""

    def handle(self, request: ServerRequest, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the answer and its tensors, or an object that stands for a future answer."""

    def due(self) -> Sequence[tuple[Any, Any]]:
        """Return each object from `handle` whose answer is ready, once, with answer and tensors, or an error."""


@final
class ServerDesk:
    """The dispatcher of one server. One thread at a time may use it.

    Args:
        server: The server.
    """

    def __init__(self, server: RequestHandler) -> None:
        self._server = server
        self._waiting: dict[int, tuple[Any, Tell]] = {}

    def take(self, request: ServerRequest, tensors: Sequence[torch.Tensor], tell: Tell) -> None:
        """Handle a request; the answer comes at once, or with a later request that makes it possible.

        Args:
            request: The request.
            tensors: The request's tensors, which must stay until `tell` is called.
            tell: Called once, with the outcome.
        """
        try:
            reply = self._server.handle(request, tensors)
        except Exception as error:
            tell(Outcome(ServerAnswer(), error=error))
            return
        if isinstance(reply, tuple):
            tell(Outcome(*reply))
        else:
            self._waiting[id(reply)] = reply, tell
        if self._waiting:
            self._tell_due()

    def _tell_due(self) -> None:
        for later, reply in self._server.due():
            _, tell = self._waiting.pop(id(later))
            tell(Outcome(ServerAnswer(), error=reply) if isinstance(reply, Exception) else Outcome(*reply))
