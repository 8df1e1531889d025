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
    Targets,
    copy_to_targets,
    pulled_by,
    server_is_late,
)
from raydist.parameter_servers.requests import ServerAnswer, ServerRequest


class LocalConnection:
    """A `ServerConnection` through which tensors are copied, as on every other one. It stays itself in a copy."""

    def __init__(self, server: RequestHandler, name: str = "parameter server 0") -> None:
        self.name = name
        self._dispatcher = RequestDispatcher(server)

    def ask(
        self, request: ServerRequest, tensors: Sequence[torch.Tensor] = (), into: Targets | None = None
    ) -> PendingAnswer:
        copies = [tensor.clone() for tensor in tensors]
        numbers = pulled_by(request)

        def pack(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            if into is None or not numbers:
                return [value.clone() for value in values]
            copy_to_targets(into, numbers, values)
            return []

        return _Pending(self.name, self._dispatcher.submit(request, copies, pack))

    def __copy__(self) -> LocalConnection:
        return self

    def __deepcopy__(self, memo: Any) -> LocalConnection:
        return self


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
