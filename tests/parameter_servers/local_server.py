"""A connection to a plain server of the test's own process."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

import raydist as rd
from raydist.parameter_servers.connection import (
    PendingAnswer,
    RequestDispatcher,
    RequestHandler,
    server_is_late,
)
from raydist.parameter_servers.requests import (
    Assign,
    CreateSlices,
    Finish,
    Pull,
    Push,
    ServerAnswer,
    ServerRequest,
    Statistics,
)
from raydist.parameter_servers.server_slices import PsSlices


class DelayedAnswer:
    def __init__(self, request: Pull) -> None:
        self.request = request


class PlainServer:
    """`Statistics` tells the requests so far by kind; `Finish` steps; a `Pull` may wait for that."""

    def __init__(self, number: int = 0) -> None:
        self.slices = PsSlices(number)
        self.counts: dict[str, int] = {}
        self.step = 0
        self._later: list[DelayedAnswer] = []

    def handle(self, request: ServerRequest, tensors: Sequence[torch.Tensor]) -> Any:
        kind = type(request).__name__
        self.counts[kind] = self.counts.get(kind, 0) + 1
        match request:
            case Statistics():
                return ServerAnswer(value=dict(self.counts)), ()
            case Pull():
                if request.at_least_step > self.step:
                    self._later.append(DelayedAnswer(request))
                    return self._later[-1]
                return self._values(request.slices, request.unless)
            case Push():
                self._change(request, tensors)
                return self._values(request.pull)
        self._change(request, tensors)
        return self._values(())

    def _change(self, request: ServerRequest, tensors: Sequence[torch.Tensor]) -> None:
        match request:
            case CreateSlices():
                self.slices.create(request.slices, tensors)
            case Push() | Assign():
                with self.slices.changing():
                    for number, tensor in zip(request.slices, tensors, strict=True):
                        value = self.slices.value(number)
                        value.copy_(value - tensor if isinstance(request, Push) else tensor)
            case Finish():
                with self.slices.changing():
                    self.step += 1
            case _:
                kind = type(request).__name__
                raise rd.InvalidArgumentError(f"A plain server must be asked plain things, got {kind}. Do not.")

    def _values(self, numbers: Sequence[int], unless: int = -1) -> tuple[ServerAnswer, Sequence[torch.Tensor]]:
        version = self.slices.version
        values = [] if version == unless else [self.slices.value(number) for number in numbers]
        return ServerAnswer(version, step=self.step), values

    def due(self) -> Sequence[tuple[Any, Any]]:
        ready = [later for later in self._later if later.request.at_least_step <= self.step]
        self._later = [later for later in self._later if later not in ready]
        return [(later, self._values(later.request.slices, later.request.unless)) for later in ready]


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
