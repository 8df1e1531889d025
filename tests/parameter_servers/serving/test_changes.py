from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import raydist as rd
from raydist.parameter_servers.requests import FenceWorker, OptimizerState, PushKey, Sender, WriteStates
from tests.parameter_servers.served import OPTIMIZER, BareWorker, answer, servers
from tests.parameter_servers.unreliable_workers import CLOSURES, Network

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


UnreliableWorkers.TestCase.settings = settings(max_examples=30, stateful_step_count=60)
TestUnreliableWorkers: Any = UnreliableWorkers.TestCase


def test_what_optimizers_remember_is_written_once() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2)]
    with servers() as [server]:
        worker = BareWorker([server], parameters, torch.optim.SGD(parameters, lr=1.0, momentum=0.5))
        for parameter in parameters:
            parameter.grad = torch.ones(2, dtype=torch.float64)
        worker.step()

        def write(sender: Sender, value: float) -> str:
            states = {OPTIMIZER: {0: {"momentum_buffer": torch.full((2,), value).double()}}}
            return answer(server, WriteStates(sender, PushKey(70, 1), states)).verdict

        assert write(Sender(0, 0), 4.0) == "applied"
        assert write(Sender(1, 0), 5.0) == "known"
        answer(server, FenceWorker(Sender(2, 0)))
        assert write(Sender(2, 0), 6.0) == "fenced"
        known = answer(server, OptimizerState(OPTIMIZER)).value
        assert [known[number]["momentum_buffer"].tolist() for number in (0, 1)] == [[4, 4], [1, 1]]
        for states, error in (({7: {}}, "Gradients and states must be of"), ({OPTIMIZER: {9: {}}}, "and not number 9")):
            with pytest.raises(rd.InvalidArgumentError, match=error):
                server.handle(WriteStates(Sender(0, 0), PushKey(71, 1), states))
