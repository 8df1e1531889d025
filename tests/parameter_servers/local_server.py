"""A connection to a server of the test's own process."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from raydist.parameter_servers.connection import (
    PendingAnswer,
    RequestDispatcher,
    RequestHandler,
    server_is_late,
)
from raydist.parameter_servers.requests import ServerAnswer, ServerRequest


class LocalConnection:
    """A `ServerConnection` through which tensors are copied, as on every other one. It stays itself in a copy."""

    def __init__(self, server: RequestHandler, name: str = "parameter server 0") -> None:
        self.name = name
        self._dispatcher = RequestDispatcher(server)

    def ask(self, request: ServerRequest, tensors: Sequence[torch.Tensor] = (), answer_bytes: int = 0) -> PendingAnswer:
        return _Pending(self.name, self._dispatcher.submit(request, [tensor.clone() for tensor in tensors], _copied))

    def __copy__(self) -> LocalConnection:
        return self

    def __deepcopy__(self, memo: Any) -> LocalConnection:
        return self


def _copied(answer: ServerAnswer, tensors: Sequence[torch.Tensor]) -> tuple[ServerAnswer, list[torch.Tensor]]:
    return answer, [tensor.clone() for tensor in tensors]


class _Pending:
    def __init__(self, name: str, future: Future[tuple[ServerAnswer, list[torch.Tensor]]]) -> None:
        self._name = name
        self._future = future

    def answer(self, timeout_s: float) -> tuple[ServerAnswer, list[torch.Tensor]]:
        try:
            return self._future.result(timeout_s)
        except TimeoutError:
            if self._future.done():
                raise
            raise server_is_late(self._name, timeout_s) from None
