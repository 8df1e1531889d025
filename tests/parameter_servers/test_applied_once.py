"""Every change is applied once, however unreliable the workers and their messages are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import raydist as rd
from raydist.parameter_servers.changes import (
    DelayedAnswer,
)
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
    OptimizerState,
    Pull,
    Push,
    PushKey,
    Sender,
    ServerAnswer,
    ServerRequest,
    WriteStates,
)
from raydist.parameter_servers.server import ParameterServer
from tests.parameter_servers.examples import OPTIMIZER, answer, ask, create, servers, slice_of

CLOSURES = 12


@dataclass
class Running:
    """A worker's run of a closure; `left` are the servers that have not answered its push yet."""

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


WORKERS = 3

WORKER, INDEX = st.integers(0, WORKERS - 1), st.integers(0, 20)

RULES = ["async", rd.BoundedStaleness(1), rd.SyncWithBackups(0), rd.SyncWithBackups(1)]


class UnreliableWorkers(RuleBasedStateMachine):
    """Whatever happens, each closure's gradient is applied once on every server, or on none if it came late."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()

    @initialize(consistency=st.sampled_from(RULES))
    def start_servers(self, consistency: Any) -> None:
        self.backups = consistency.num_backups if isinstance(consistency, rd.SyncWithBackups) else 0
        self.network = Network(self.stack.enter_context(servers(2, consistency)), consistency, WORKERS)

    @rule(worker=WORKER)
    def start(self, worker: int) -> None:
        self.network.start(worker)

    @rule(index=INDEX)
    def deliver(self, index: int) -> None:
        self.network.deliver(index)

    @rule(index=INDEX)
    def deliver_again(self, index: int) -> None:
        self.network.deliver_again(index)

    @rule(worker=WORKER)
    def kill(self, worker: int) -> None:
        self.network.kill(worker)

    def teardown(self) -> None:
        try:
            if hasattr(self, "network"):
                self.network.drain()
                self.require_once()
        finally:
            self.stack.close()

    def require_once(self) -> None:
        network = self.network
        assert self.backups or not network.dropped
        for server, values in zip(network.servers, network.values(), strict=True):
            for closure, value in enumerate(values):
                if closure in network.dropped:
                    assert value == 0.0
                else:
                    assert -value in [1 / count for count in range(1, 1 + WORKERS if network.in_steps else 2)]
            assert server.stats.pushes == CLOSURES - len(network.dropped)


UnreliableWorkers.TestCase.settings = settings(max_examples=20, stateful_step_count=60)

TestUnreliableWorkers: Any = UnreliableWorkers.TestCase


def test_what_optimizers_remember_is_written_once() -> None:
    with servers() as [server]:
        create(server, 2, 2, lr=1.0, momentum=0.5)
        push = Push(Sender(0, 0), PushKey(0, 0), OPTIMIZER, (0, 1), ("dense", "dense"))
        answer(server, push, *torch.ones(2, 2, dtype=torch.float64))

        def write(sender: Sender, value: float) -> str:
            states = {OPTIMIZER: {0: {"momentum_buffer": torch.full((2,), value).double()}}}
            return answer(server, WriteStates(sender, PushKey(70, 1), states)).verdict

        assert write(Sender(0, 0), 4.0) == "applied"
        assert write(Sender(1, 0), 5.0) == "known"
        answer(server, FenceWorker(Sender(2, 0)))
        assert write(Sender(2, 0), 6.0) == "fenced"
        assert (server.stats.repeated, server.stats.fenced) == (1, 1)
        known = answer(server, OptimizerState(OPTIMIZER)).value
        assert [known[number]["momentum_buffer"].tolist() for number in (0, 1)] == [[4, 4], [1, 1]]
        for states, error in (({7: {}}, "Gradients and states must be of"), ({OPTIMIZER: {9: {}}}, "and not number 9")):
            with pytest.raises(rd.InvalidArgumentError, match=error):
                server.handle(WriteStates(Sender(0, 0), PushKey(71, 1), states))
