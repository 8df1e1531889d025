from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import raydist as rd
from raydist.parameter_servers.requests import FenceWorker, OptimizerState, PushKey, Sender, ServerAnswer, WriteStates
from raydist.parameter_servers.serving.changes import Answered, AppliedUpdates, CollectedSteps, DelayedAnswers
from raydist.parameter_servers.serving.optimizers import PushedRows, ServerGradients
from tests.parameter_servers.examples import OPTIMIZER, BareWorker, answer, servers
from tests.parameter_servers.unreliable_workers import CLOSURES, Network

CHANGES = [(closure, index) for closure in range(5) for index in range(2)]


@given(st.integers(0, 10**6), st.integers(1, 3))
def test_each_change_is_applied_once_however_often_it_comes(seed: int, times: int) -> None:
    draw = random.Random(seed)
    coming = CHANGES * times
    draw.shuffle(coming)
    applied_updates = AppliedUpdates()
    applied = []
    for closure, index in coming:
        sender = Sender(draw.randrange(3), draw.randrange(2))
        key = PushKey(closure, index)
        verdict = applied_updates.check(sender, key)
        assert applied_updates.enter(sender, key) == verdict
        applied += [(closure, index)] * (verdict == "applied")
    assert sorted(applied) == CHANGES


def test_what_has_ended_is_forgotten_and_counts_as_known() -> None:
    applied_updates, sender = AppliedUpdates(), Sender(0, 0)
    for closure in range(100):
        key = PushKey(closure, 0, finished_below=max(0, closure - 3))
        assert applied_updates.enter(sender, key) == "applied"
        assert applied_updates.num_known <= 4
    assert applied_updates.check(sender, PushKey(5, 0)) == "known"
    assert applied_updates.check(sender, PushKey(5, 7)) == "known"
    assert applied_updates.check(sender, PushKey(99, 1, finished_below=0)) == "applied"


def test_generations_up_to_the_fence_are_refused() -> None:
    applied_updates, key = AppliedUpdates(), PushKey(1, 0)
    applied_updates.fence(Sender(4, 2))
    applied_updates.fence(Sender(4, 1))  # told late
    for generation, verdict in ((0, "fenced"), (2, "fenced"), (3, "applied")):
        assert applied_updates.enter(Sender(4, generation), key) == verdict
    assert applied_updates.enter(Sender(5, 0), key) == "known"
    assert not applied_updates.is_fenced(Sender(-1, 0))


def test_each_is_answered_once_it_may_be_and_once() -> None:
    delayed = DelayedAnswers()
    opened: set[str] = set()

    def wait_for(name: str) -> object:
        return delayed.add(lambda: name in opened, lambda: (ServerAnswer(value=name), []))

    first, second, third = (wait_for(name) for name in "abc")
    opened |= {"c", "a"}
    due = delayed.due()
    assert [later for later, _ in due] == [first, third]
    assert [told[0].value for _, told in due if not isinstance(told, Exception)] == ["a", "c"]
    assert delayed.due() == []
    assert len(delayed) == 1
    opened.add("b")
    assert [later for later, _ in delayed.due()] == [second]


def test_an_answer_that_fails_is_its_requests() -> None:
    def fail() -> Answered:
        raise KeyError("gone")

    delayed = DelayedAnswers()
    delayed.add(lambda: True, fail)
    delayed.add(lambda: True, lambda: (ServerAnswer(), []))
    errors = [told for _, told in delayed.due() if isinstance(told, Exception)]
    assert repr(errors) == "[KeyError('gone')]"
    assert len(delayed) == 0


def dense(*values: float) -> ServerGradients:
    return ServerGradients({0: torch.tensor(values)}, {})


def rows(*numbers: int, value: float = 1.0) -> PushedRows:
    return PushedRows(torch.tensor(numbers), torch.full((len(numbers), 1), value))


def test_a_step_is_the_mean_of_all_that_make_it_up() -> None:
    steps = CollectedSteps()
    steps.add(0, 2, 7, dense(1.0, 2.0))
    steps.expect(0, 2)
    assert steps.take() is None
    steps.add(0, 2, 7, None)  # comes twice
    assert steps.take() is None
    steps.add(1, 2, 7, dense(9.0, 9.0))  # already in the next step
    steps.add(0, 1, 7, dense(3.0, 2.0))
    means = steps.take()
    assert means is not None
    assert steps.step == 1
    mean = means[7].slices[0]
    assert isinstance(mean, torch.Tensor)
    assert mean.tolist() == [2.0, 2.0]
    assert steps.take() is None
    steps.expect(1, 1)
    later = steps.take()
    assert later is not None
    assert not isinstance(later[7].slices[0], PushedRows)
    assert later[7].slices[0].tolist() == [9.0, 9.0]


def test_memory_of_sums_is_used_again_but_not_while_it_is_read() -> None:
    steps = CollectedSteps()
    addresses = []
    for step in range(4):
        steps.add(step, 0, 7, dense(float(step)))
        steps.expect(step, 1)
        means = steps.take()
        assert means is not None
        mean = means[7].slices[0]
        assert isinstance(mean, torch.Tensor)
        assert mean.tolist() == [step]
        addresses.append(mean.data_ptr())
    assert addresses[0] != addresses[1]
    assert len(set(addresses)) == 2


def test_the_memory_of_gradients_may_be_used_again() -> None:
    steps = CollectedSteps()
    gradient, some = torch.ones(2), rows(1)
    steps.add(0, 0, 7, ServerGradients({0: gradient, 1: some}, {5: some}))
    gradient.fill_(torch.nan)
    some.values.fill_(torch.nan)
    steps.expect(0, 1)
    means = steps.take()
    assert means is not None
    kept = means[7].slices
    assert isinstance(kept[0], torch.Tensor)
    assert isinstance(kept[1], PushedRows)
    assert (kept[0].tolist(), kept[1].values.tolist()) == ([1, 1], [[1]])
    assert means[7].tables[5].values.tolist() == [[1]]


def test_who_has_no_gradient_for_a_slice_counts_as_zeros() -> None:
    steps = CollectedSteps()
    steps.add(0, 0, 7, ServerGradients({0: torch.tensor([[4.0], [4.0]])}, {}))
    steps.add(0, 1, 7, ServerGradients({0: rows(1, 1, value=2.0), 1: rows(0)}, {5: rows(3)}))
    steps.add(0, 2, 8, ServerGradients({3: torch.tensor([6.0])}, {}))
    steps.expect(0, 3)
    means = steps.take()
    assert means is not None
    mixed, some, other = means[7].slices[0], means[7].slices[1], means[8].slices[3]
    assert isinstance(mixed, torch.Tensor)
    assert isinstance(some, PushedRows)
    assert isinstance(other, torch.Tensor)
    assert (mixed.tolist(), some.values.tolist(), other.tolist()) == ([[2], [4]], [[0.5]], [6])
    assert means[7].tables[5].values.tolist() == [[0.5]]


def test_nobody_waits_for_the_dead() -> None:
    steps = CollectedSteps()
    steps.add(0, 1, 7, dense(3.0))
    steps.drop(0, 2)
    assert steps.take() is None  # of how many it is nobody has said
    steps.expect(0, 2)
    means = steps.take()
    assert means is not None
    assert not isinstance(means[7].slices[0], PushedRows)
    assert means[7].slices[0].tolist() == [3.0]
    steps.drop(1, 1)
    steps.expect(1, 1)
    assert steps.take() == {}  # all of them died: a step of nothing
    steps.drop(0, 1)
    steps.expect(0, 2)
    assert steps.take() is None
    assert steps.step == 2


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
