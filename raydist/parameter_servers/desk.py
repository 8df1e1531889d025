"""One server and all who ask it: each answer goes to whom it is for, also where it must wait for others' requests."""

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
    """What came of a request.

    Attributes:
        answer: What the server says.
        tensors: Its tensors: they may be the server's own, which the next request changes.
        error: What the server raised instead.
    """

    answer: ServerAnswer
    tensors: Sequence[torch.Tensor] = ()
    error: BaseException | None = None


Tell = Callable[[Outcome], None]


class RequestHandler(Protocol):
    """`ParameterServer`, as far as it is asked from here."""

    def handle(self, request: ServerRequest, tensors: Sequence[torch.Tensor]) -> Any:
        """The answer and its tensors, or an object that stands for an answer to come."""

    def due(self) -> Sequence[tuple[Any, Any]]:
        """Objects that `handle` gave and that have an answer now, each once: with answer and tensors, or an error."""


@final
class ServerDesk:
    """Used by one thread at a time.

    Args:
        server: Who answers.
    """

    def __init__(self, server: RequestHandler) -> None:
        self._server = server
        self._waiting: dict[int, tuple[Any, Tell]] = {}

    def take(self, request: ServerRequest, tensors: Sequence[torch.Tensor], tell: Tell) -> None:
        """Have a request answered: now, or when a later one has made that possible.

        Args:
            request: What is asked.
            tensors: Its tensors, which must stay until `tell` is called.
            tell: Is given what came of it, once.
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
