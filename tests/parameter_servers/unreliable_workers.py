"""Workers whose messages to parameter servers come late, twice or never, and who die at any point."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import torch

from raydist.parameter_servers.consistency import Consistency, SyncWithBackups
from raydist.parameter_servers.requests import (
    AddOptimizer,
    Arrive,
    BeginClosure,
    CreateSlices,
    DropArrival,
    EndClosure,
    FenceWorker,
    OptimizerGroup,
    Pull,
    Push,
    PushKey,
    Sender,
    ServerAnswer,
    ServerRequest,
)
from raydist.parameter_servers.server import ParameterServer
from raydist.parameter_servers.serving.changes import DelayedAnswer
from tests.parameter_servers.examples import OPTIMIZER, answer, ask, slice_of

CLOSURES = 12


@dataclass
class Running:
    """A worker's run of a closure.

    Attributes:
        sender: Who runs it.
        closure: Which.
        left: Servers that have not answered its push yet.
    """

    sender: Sender
    closure: int
    left: set[int] = field(default_factory=set)


@dataclass
class Message:
    """Something on its way to a server; `then` is given the answer, once."""

    server: int
    request: ServerRequest
    run: Running
    then: Callable[[ServerAnswer], None]
    tensors: Sequence[torch.Tensor] = ()


class Network:
    """Workers, servers and what is on its way. Closure c has a gradient of 1 for element c alone."""

    def __init__(self, servers: list[ParameterServer], consistency: Consistency, workers: int) -> None:
        self.servers = servers
        self.in_steps = isinstance(consistency, SyncWithBackups)
        self.queue = list(range(CLOSURES))
        self.ended: set[int] = set()
        self.dropped: set[int] = set()
        self.generations = [0] * workers
        self.runs: dict[int, Running] = {}
        self.messages: list[Message] = []
        self.delivered: list[Message] = []
        self.waiting: dict[DelayedAnswer, Message] = {}
        for number, server in enumerate(servers):
            answer(server, CreateSlices((slice_of(number, CLOSURES),)), torch.zeros(CLOSURES).double())
            group = OptimizerGroup(torch.optim.SGD([torch.zeros(1)], lr=1.0).defaults, (number,))
            answer(server, AddOptimizer(OPTIMIZER, cloudpickle.dumps(torch.optim.SGD), (group,)))

    def finished_below(self) -> int:
        return next(closure for closure in range(CLOSURES + 1) if closure not in self.ended)

    def start(self, worker: int) -> None:
        """A free worker takes the next closure."""
        if worker in self.runs or not self.queue:
            return
        run = Running(Sender(worker, self.generations[worker]), self.queue.pop(0))
        self.runs[worker] = run
        if self.in_steps:
            self.send(run, 0, BeginClosure(run.sender, run.closure), lambda told: self.read(run, told.step))
        else:
            self.compute(run, 0)

    def read(self, run: Running, step: int) -> None:
        read = Pull((0,), run.sender, at_least_step=step)
        self.send(run, 0, read, lambda told: self.compute(run, told.step))

    def compute(self, run: Running, step: int) -> None:
        key = PushKey(run.closure, 0, self.finished_below())
        if not self.in_steps:
            self.push(run, key)
            return
        self.send(run, 0, Arrive(run.sender, key, step), lambda told: self.arrived(run, key, told))

    def arrived(self, run: Running, key: PushKey, told: ServerAnswer) -> None:
        if told.verdict == "late":
            self.dropped.add(run.closure)
            self.end(run)
        else:
            self.push(run, key, step=told.step, completes=told.completes)

    def push(self, run: Running, key: PushKey, **fields: Any) -> None:
        run.left = set(range(len(self.servers)))
        for server in range(len(self.servers)):
            gradient = torch.zeros(CLOSURES).double()
            gradient[run.closure] = 1.0
            push = Push(run.sender, key, OPTIMIZER, (server,), ("dense",), pull=(server,), **fields)
            self.send(run, server, push, functools.partial(self.pushed, run, server), gradient)

    def pushed(self, run: Running, server: int, told: ServerAnswer) -> None:
        run.left.discard(server)
        if not run.left:
            self.end(run)

    def end(self, run: Running) -> None:
        self.ended.add(run.closure)
        del self.runs[run.sender.worker]
        if self.in_steps:
            answer(self.servers[0], EndClosure(run.sender, run.closure))
            self.look()

    def send(
        self,
        run: Running,
        server: int,
        request: ServerRequest,
        then: Callable[[ServerAnswer], None],
        *tensors: torch.Tensor,
    ) -> None:
        self.messages.append(Message(server, request, run, then, tensors))

    def deliver(self, index: int) -> None:
        """Any of the messages comes."""
        if self.messages:
            message = self.messages.pop(index % len(self.messages))
            self.delivered.append(message)
            reply = self.servers[message.server].handle(message.request, [each.clone() for each in message.tensors])
            if isinstance(reply, DelayedAnswer):
                self.waiting[reply] = message
            else:
                self.tell(message, reply[0])
            self.look()

    def deliver_again(self, index: int) -> None:
        """One that has come before comes once more; nobody hears the answer."""
        pushes = [each for each in self.delivered if isinstance(each.request, Push | Arrive)]
        if pushes:
            message = pushes[index % len(pushes)]
            self.servers[message.server].handle(message.request, [each.clone() for each in message.tensors])
            self.look()

    def kill(self, worker: int) -> None:
        """A worker dies; its closure is the next one to be given out. What it has sent is still on its way."""
        run = self.runs.pop(worker, None)
        sender = Sender(worker, self.generations[worker])
        self.generations[worker] += 1
        told = [answer(server, FenceWorker(sender)) for server in self.servers]
        if told[0].completes:
            for server in self.servers:
                answer(server, DropArrival(sender, told[0].step, told[0].completes))
        if run is not None:
            self.queue.insert(0, run.closure)
        self.look()

    def look(self) -> None:
        for server in self.servers:
            for later, told in server.due():
                assert not isinstance(told, Exception), told
                message = self.waiting.pop(later, None)
                if message is not None:
                    self.tell(message, told[0])

    def tell(self, message: Message, told: ServerAnswer) -> None:
        worker = message.run.sender.worker
        if self.runs.get(worker) is message.run:
            assert told.verdict != "fenced"
            message.then(told)
        elif self.generations[worker] != message.run.sender.generation:
            assert told.verdict == "fenced" or message in self.delivered

    def drain(self) -> None:
        """Let everything come to its end."""
        for _ in range(50 * CLOSURES):
            for worker in range(len(self.generations)):
                self.start(worker)
            if not self.messages and not self.runs and not self.queue:
                return
            self.deliver(0)
        raise AssertionError(f"stuck: {self.runs}, {self.messages}, {len(self.waiting)} wait")

    def values(self) -> list[list[float]]:
        """Of each server's element for each closure."""
        return [ask(server, Pull((number,)))[1][0].tolist() for number, server in enumerate(self.servers)]
