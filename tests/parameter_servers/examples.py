"""Slices and servers for tests, without what usually lies between them and workers; a connection without actors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import cloudpickle
import torch

from raydist.parameter_servers.changes import Answered, DelayedAnswer
from raydist.parameter_servers.connection import PendingAnswer, RequestDispatcher, RequestHandler, server_is_late
from raydist.parameter_servers.consistency import Consistency
from raydist.parameter_servers.requests import (
    AddOptimizer,
    Arrive,
    BeginClosure,
    CreateSlices,
    OptimizerGroup,
    Push,
    PushKey,
    Sender,
    ServerAnswer,
    ServerRequest,
)
from raydist.parameter_servers.server import ParameterServer
from raydist.parameter_servers.server_slices import PsSlices
from raydist.parameter_servers.slices import PsSlice

OPTIMIZER = 100


def slice_of(number: int, *shape: int, dtype: torch.dtype = torch.float64, server: int = 0, begin: int = 0) -> PsSlice:
    return PsSlice(number, number, f"variable{number}", server, begin, shape, dtype)


@contextmanager
def slices_of_zeros(*slices: PsSlice, room: int | None = None) -> Iterator[PsSlices]:
    """Slices of zeros."""
    made = PsSlices(0, free_bytes=lambda: room)
    if slices:
        made.create(slices, [torch.zeros(each.shape, dtype=each.dtype) for each in slices])
    yield made


@contextmanager
def servers(count: int = 1, consistency: Consistency = "async", **options: Any) -> Iterator[list[ParameterServer]]:
    """Parameter servers in this process, closed afterwards."""
    made = [ParameterServer(number, count, consistency, **options) for number in range(count)]
    try:
        yield made
    finally:
        for server in made:
            server.close()


def ask(server: ParameterServer, request: ServerRequest, *tensors: torch.Tensor) -> Answered:
    """An answer that comes at once."""
    reply = server.handle(request, tensors)
    assert not isinstance(reply, DelayedAnswer)
    return reply[0], [tensor.clone() for tensor in reply[1]]


def answer(server: ParameterServer, request: ServerRequest, *tensors: torch.Tensor) -> ServerAnswer:
    return ask(server, request, *tensors)[0]


def create(server: ParameterServer, *sizes: int, kind: Any = torch.optim.SGD, **options: Any) -> None:
    """Create slices of zeros and their optimizer, unless the server has them: then it is told again."""
    slices = tuple(slice_of(number, size) for number, size in enumerate(sizes))
    answer(server, CreateSlices(slices), *(torch.zeros(each.shape, dtype=each.dtype) for each in slices))
    answer(server, optimizer_of(*range(len(sizes)), kind=kind, **options))


def optimizer_of(*numbers: int, kind: Any = torch.optim.SGD, **options: Any) -> AddOptimizer:
    """Return the request that adds an optimizer of these slices."""
    defaults = kind([torch.zeros(1)], **options).defaults
    return AddOptimizer(OPTIMIZER, cloudpickle.dumps(kind), (OptimizerGroup(defaults, numbers),))


def finish_step(ask: Callable[[ServerRequest], ServerAnswer]) -> ServerAnswer:
    """Complete a step of `SyncWithBackups(0)` with one gradient of nothing, and return the answer to that."""
    worker = Sender(9, 0)
    step = ask(BeginClosure(worker, 1000)).step
    key = PushKey(1000 + step, 0)
    ask(Arrive(worker, key, step))
    return ask(Push(worker, key, OPTIMIZER, (), (), step=step, completes=1))


ME = Sender(0, 0)


def push_of(key: PushKey, sender: Sender = ME, **fields: Any) -> Push:
    """A push of one gradient, of slice 0."""
    return Push(sender, key, OPTIMIZER, (0,), ("dense",), **fields)


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
