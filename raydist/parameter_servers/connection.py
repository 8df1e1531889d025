"""Connections to a parameter server: the interface that its clients use, and the dispatcher on the server's end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar, final

import torch

from raydist.compat.torch_internals import foreach_copy
from raydist.core.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from raydist.parameter_servers.requests import ServerAnswer, ServerRequest

_Packed = TypeVar("_Packed")

Targets = Mapping[int, torch.Tensor]
"""By slice number the tensors into which values are copied, in place."""


class PendingAnswer(Protocol):
    """A request that was sent to a server."""

    def answer(self, timeout_s: float) -> tuple[ServerAnswer, Sequence[torch.Tensor]]:
        """Block until the server answers, and return the answer. To be called once.

        Returns:
            The answer and its tensors, which must not be written to.

        Raises:
            DeadlineExceededError: The server has not answered in time.
            UnavailableError: The server is gone.
            Exception: The error that the server raised.
        """


class ServerConnection(Protocol):
    """A connection to a server. Thread-safe; copies of it in other processes reach the same server."""

    @property
    def name(self) -> str:
        """Name of the server, for messages."""

    def ask(self, request: ServerRequest, tensors: Sequence[torch.Tensor] = (), answer_bytes: int = 0) -> PendingAnswer:
        """Send a request without waiting for the answer.

        Args:
            request: The request.
            tensors: The request's tensors: dense and on the CPU. The caller may overwrite them afterwards.
            answer_bytes: Expected size of the answer's tensors.
        """


def copy_to_targets(targets: Iterable[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy an answer's values to their targets; does nothing for an answer without values (nothing had changed)."""
    if not values:
        return
    wanted = list(targets)
    if len(values) != len(wanted):
        raise InvalidArgumentError(
            f"raydist bug: an answer must have the values of {len(wanted)} slices, got {len(values)}."
        )
    with torch.no_grad():
        foreach_copy(wanted, list(values))


def server_is_late(name: str, timeout_s: float) -> DeadlineExceededError:
    """Return the error for a server that does not answer in time."""
    return DeadlineExceededError(
        f"There must be an answer from {name} within {timeout_s:g} s, but there is none. It may be busy or stuck, or "
        "wait for a worker that is slower than consistency allows: look there, or raise Timeouts.collective_s."
    )


def server_is_gone(name: str) -> UnavailableError:
    """Return the error for a server whose process is gone: its values are lost."""
    return UnavailableError(
        f"{name} is gone, and with it the variables that it held. Make a new strategy, and restore from your last "
        "checkpoint there.",
        actor=name,
    )


class RequestHandler(Protocol):
    """The part of `ParameterServer` that the dispatcher uses."""

    def handle(self, request: ServerRequest, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the answer and its tensors, or an object that stands for a future answer."""

    def due(self) -> Sequence[tuple[Any, Any]]:
        """Return each object from `handle` whose answer is ready, once, with answer and tensors, or an error."""


Pack = Callable[[ServerAnswer, Sequence[torch.Tensor]], _Packed]
"""Copies an answer and its tensors, which the next request may change."""


@final
class RequestDispatcher:
    """Hands the requests of all clients to one server, one at a time. Thread-safe."""

    def __init__(self, server: RequestHandler) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._waiting: dict[Any, tuple[Future[Any], Pack[Any]]] = {}

    def submit(self, request: ServerRequest, tensors: Sequence[torch.Tensor], pack: Pack[_Packed]) -> Future[_Packed]:
        """Handle a request. The answer comes at once, or with a later request that makes it possible.

        Returns:
            The packed answer, or the error that the server raised.
        """
        future: Future[_Packed] = Future()
        with self._lock:
            try:
                reply = self._server.handle(request, tensors)
            except Exception as error:
                reply = error
            if isinstance(reply, tuple | Exception):
                _settle(future, pack, reply)
            else:
                self._waiting[reply] = future, pack
            if self._waiting:
                for later, answered in self._server.due():
                    _settle(*self._waiting.pop(later), answered)
        return future


def _settle(future: Future[Any], pack: Pack[Any], reply: Any) -> None:
    if isinstance(reply, Exception):
        future.set_exception(reply)
        return
    try:
        packed = pack(*reply)
    except Exception as error:  # such as no memory: an error of this client, not of the one that made the answer ready
        future.set_exception(error)
    else:
        future.set_result(packed)
