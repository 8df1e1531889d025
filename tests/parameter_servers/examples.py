"""Slices and servers for tests, without what usually lies between them and workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import cloudpickle
import torch

from raydist.parameter_servers.changes import Answered, DelayedAnswer
from raydist.parameter_servers.consistency import Consistency
from raydist.parameter_servers.requests import (
    AddOptimizer,
    CreateSlices,
    OptimizerGroup,
    Pull,
    Push,
    PushKey,
    Sender,
    ServerAnswer,
    ServerRequest,
)
from raydist.parameter_servers.server import ParameterServer
from raydist.parameter_servers.server_slices import PsSlices
from raydist.parameter_servers.slices import FixedShardsPartitioner, PsSlice, VariableSpec, plan_slices

OPTIMIZER = 100


def slice_of(number: int, *shape: int, dtype: torch.dtype = torch.float64, server: int = 0, begin: int = 0) -> PsSlice:
    return PsSlice(number, number, f"variable{number}", server, begin, shape, dtype)


@contextmanager
def slices_of_zeros(*slices: PsSlice, room: int | None = None) -> Iterator[PsSlices]:
    """Slices of zeros."""
    made = PsSlices(0, room=lambda: room)
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


class BareWorker:
    """Keeps the parameters of a model on servers, as a worker does.

    Args:
        servers: These.
        parameters: Of the model.
        optimizer: Steps them, on the servers.
        number: Of the worker; the first one has the slices created.
    """

    def __init__(
        self,
        servers: Sequence[ParameterServer],
        parameters: Sequence[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        number: int = 0,
        shards: int = 1,
    ) -> None:
        self.sender = Sender(number, 0)
        self.servers = servers
        self.parameters = list(parameters)
        self.optimizer = optimizer
        self.keys = (PushKey(closure, 0) for closure in itertools.count())
        specs = [VariableSpec(i, f"v{i}", tuple(p.shape), p.dtype) for i, p in enumerate(self.parameters)]
        self.slices = plan_slices(specs, [0] * len(servers), FixedShardsPartitioner(shards), 0)
        self.versions = [0] * len(servers)
        for server in range(len(servers) if number == 0 else 0):
            self.create(server)

    def mine(self, server: int) -> list[PsSlice]:
        return [each for each in self.slices if each.server == server]

    def view(self, each: PsSlice) -> torch.Tensor:
        return each.within(self.parameters[each.handle].data)

    def create(self, server: int) -> None:
        mine = self.mine(server)
        values = [self.view(each).clone() for each in mine]
        answer(self.servers[server], CreateSlices(tuple(mine)), *values)
        places = {parameter: handle for handle, parameter in enumerate(self.parameters)}
        groups = [
            OptimizerGroup(options_of(group), tuple(each.number for each in mine if each.handle in handles))
            for group in self.optimizer.param_groups
            for handles in [{places[parameter] for parameter in group["params"]}]
        ]
        kind = cloudpickle.dumps(type(self.optimizer))
        answer(self.servers[server], AddOptimizer(OPTIMIZER, kind, tuple(groups)))

    def pull(self) -> None:
        for number, server in enumerate(self.servers):
            mine = self.mine(number)
            told, tensors = ask(server, Pull(tuple(each.number for each in mine), self.sender))
            self.versions[number] = told.version
            for each, tensor in zip(mine, tensors, strict=True):
                self.view(each).copy_(tensor)

    def request(self, server: int, key: PushKey, **fields: Any) -> tuple[Push, list[torch.Tensor]]:
        tensors: list[torch.Tensor] = []
        numbers: list[int] = []
        forms: list[Any] = []
        for each in self.mine(server):
            gradient = self.parameters[each.handle].grad
            if gradient is not None:
                numbers.append(each.number)
                forms.append("rows" if gradient.is_sparse else "dense")
                tensors += pieces(each, gradient)
        push = Push(self.sender, key, OPTIMIZER, tuple(numbers), tuple(forms), **fields)
        return push, tensors

    def step(self) -> None:
        """What `optimizer.step()` is for a worker, under "async"."""
        key = next(self.keys)
        for number, server in enumerate(self.servers):
            mine = self.mine(number)
            push, tensors = self.request(
                number,
                key,
                options=tuple(options_of(group) for group in self.optimizer.param_groups),
                read_version=self.versions[number],
                pull=tuple(each.number for each in mine),
            )
            told, values = ask(server, push, *tensors)
            for tensor in tensors:
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)  # the memory is used again
            self.versions[number] = told.version
            for each, value in zip(mine, values, strict=True):
                self.view(each).copy_(value)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def pieces(each: PsSlice, gradient: torch.Tensor) -> list[torch.Tensor]:
    """A slice's part of a gradient, as it travels."""
    if not gradient.is_sparse:
        return [each.within(gradient).clone()]
    whole = gradient.coalesce()
    rows = whole.indices()[0] - each.begin
    inside = (rows >= 0) & (rows < each.shape[0])
    return [rows[inside], whole.values()[inside]]


Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
