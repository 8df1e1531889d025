"""A server for tests of connections: gradients are subtracted, and some answers come later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import raydist as rd
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
from raydist.parameter_servers.serving.slices import PsSlices


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
