"""Slices and servers for tests, without what usually lies between them and workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle
import torch

from raydist.parameter_servers.changes import Answered, DelayedAnswer
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
