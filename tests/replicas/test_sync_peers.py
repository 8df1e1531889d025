"""Replicas that step together: batches, buffers, collectives, and closures of optimizers."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from raydist.collectives.base import Communicator
from raydist.collectives.reducer.nonfinite import NonfinitePolicy
from raydist.context.current import enter_replica
from raydist.context.replica_context import ReplicaContext
from raydist.core.errors import InvalidArgumentError
from raydist.core.values import ReduceOp
from raydist.options import CommunicationOptions
from raydist.replicas.function_calls import ReplicaView
from raydist.replicas.rules import ReplicaVariables, StrategyHooks
from raydist.replicas.sync_peers import SyncPeers
from tests.collectives.local_group import LocalGroup
from tests.collectives.models import pieces
from tests.collectives.threads import run_ranks
from tests.contracts.exchange_program import Parts, connected

CPU = torch.device("cpu")


class NotingReducer:
    """Notes with which weights steps were opened."""

    def __init__(self) -> None:
        self.opened: list[tuple[float, bool]] = []

    def make_global(self, parameters: Any, **how: Any) -> bool:
        """Nothing to reduce here."""
        return False

    def attach(self, parameters: Any) -> None:
        """Nothing to reduce here."""

    def weigh(self, weight: float, op: ReduceOp, *, empty: bool) -> tuple[float, bool]:
        return weight, empty

    def begin_step(self, weight: tuple[float, bool], adds_up: bool) -> None:
        self.opened.append(weight)

    def end_step(self) -> None:
        """Nothing was begun."""


class Mirror:
    """The variables of a replica: none."""

    aggregates_buffers = False
    num_gradients_set = 0

    def __init__(self, rank: int) -> None:
        """Any rank will do."""

    def nothing(self, *told: Any, **named: Any) -> list[Any]:
        return []

    parameters = objects = export_buffers = import_buffers = written_buffers = hold_metrics = restore_metrics = nothing


def on_replicas(
    world_size: int, body: Callable[[SyncPeers, NotingReducer], Any], rules: StrategyHooks | None = None
) -> list[Any]:
    def main(group: LocalGroup) -> Any:
        reducer, mirror = NotingReducer(), Mirror(group.rank)
        return body(SyncPeers(group, reducer, CPU, mirror, NonfinitePolicy(lambda _: []), rules), reducer)  # type: ignore[arg-type]  # stand-ins

    return run_ranks(world_size, main)


def test_rows_that_come_again_weigh_what_the_reduction_of_their_run_says() -> None:
    """Zero rows weigh nothing under MEAN alone: what was worked out for one run is not the other's."""

    def body(peers: SyncPeers, reducer: NotingReducer) -> Any:
        for op in (ReduceOp.MEAN, ReduceOp.MEAN, ReduceOp.SUM, ReduceOp.MEAN):
            with peers.run((2, 0), op, padding=False):
                pass
        return [empty for _, empty in reducer.opened]

    assert on_replicas(2, body) == [[False] * 4, [True, True, False, True]]


class Notes(StrategyHooks):
    """Notes of which batches it is told."""

    exchanges_gradients = False

    def __init__(self) -> None:
        self.told: list[Any] = []

    def after_batch(self, variables: ReplicaVariables) -> None:
        self.told.append(variables.rows)

    def after_run(self, variables: ReplicaVariables) -> None:
        self.told.append("end")

    def step_optimizer(self, variables: ReplicaVariables, optimizer: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
        self.told.append(optimizer)
        return step(*args, **kwargs)


def test_rules_are_told_of_each_batch_and_each_run() -> None:
    rules = Notes()

    def body(peers: SyncPeers, reducer: NotingReducer) -> None:
        with peers.run((1,), ReduceOp.MEAN, padding=True):
            assert peers.step_optimizer("an optimizer", lambda: "done") == "done"  # type: ignore[arg-type]  # any will do
        with peers.run(None, ReduceOp.MEAN, padding=True):
            peers.next_batch((2,))
            peers.next_batch((3,))
        with contextlib.suppress(KeyboardInterrupt), peers.run(None, ReduceOp.MEAN, padding=True):
            peers.leave_run()  # before the first draw
            peers.next_batch((5,))
            peers.leave_run()
            raise KeyboardInterrupt
        with pytest.raises(KeyError), peers.run((4,), ReduceOp.MEAN, padding=True):
            raise KeyError

    on_replicas(1, body, rules)
    assert rules.told == ["an optimizer", (1,), "end", (2,), (3,), "end", "end", (5,), "end"]


def test_local_updates_weigh_nothing_but_rows_and_are_not_compared() -> None:
    def body(peers: SyncPeers, reducer: NotingReducer) -> Any:
        peers._sync_check = None  # type: ignore[assignment]  # it would be used
        with peers.run((3, 1, 0), ReduceOp.MEAN, padding=True, param_sync_every=1):
            pass
        return reducer.opened

    assert on_replicas(3, body, Notes()) == [[(1.0, False)], [(1.0, False)], [(0.0, True)]]


def test_a_call_may_have_a_limit_and_a_compression_of_its_own() -> None:
    def body(peers: SyncPeers, reducer: NotingReducer) -> Any:
        value = torch.tensor([1.0 + 2.0**-12], requires_grad=True)
        plain = peers.all_reduce(ReduceOp.SUM, value, CommunicationOptions(timeout_seconds=5.0))
        small = peers.all_reduce(ReduceOp.SUM, value, CommunicationOptions(compression="fp16"))
        small.sum().backward()
        double = peers.all_reduce(ReduceOp.SUM, value.double(), CommunicationOptions(compression="bf16"))
        gradient = value.grad
        assert gradient is not None
        return plain.item(), small.item(), small.dtype, double.item(), gradient.item()

    exact = 2 + 2.0**-11
    assert on_replicas(2, body) == [(exact, 2.0, torch.float32, exact, 1.0 * 2)] * 2


def test_only_the_strategys_implementation_can_carry_a_call() -> None:
    def body(peers: SyncPeers, reducer: NotingReducer) -> None:
        peers.implementation = "gloo"
        context = ReplicaContext(ReplicaView(("cpu",) * 2), peers)
        assert context.all_reduce("SUM", 1, options=CommunicationOptions(implementation="gloo")) == 2
        assert context.all_gather(torch.ones(1), options=CommunicationOptions(bytes_per_pack=3)).tolist() == [1.0, 1.0]
        with pytest.raises(InvalidArgumentError, match="the implementation of its strategy, 'gloo', got 'shm'"):
            context.all_reduce("SUM", 1, options=CommunicationOptions(implementation="shm"))
        with pytest.raises(InvalidArgumentError, match=r"an rd.CommunicationOptions, got str"):
            context.all_gather(torch.ones(1), options="gloo")  # type: ignore[arg-type]  # the point

    on_replicas(2, body)


GENERATOR = torch.Generator().manual_seed(0)

X = torch.randn(31, 4, dtype=torch.float64, generator=GENERATOR)

Y = torch.sin(X).sum(1, keepdim=True)

LBFGS = functools.partial(torch.optim.LBFGS, lr=0.5, max_iter=8)


class CallsBackward(torch.optim.SGD):
    """Calls backward() on what its closure returns."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
            loss.backward()
        super().step()
        return loss


def loss_by_backward(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any, denominator: Any) -> Any:
    optimizer.zero_grad()
    loss = (model(x) - y).square().sum() / denominator
    loss.backward()
    return loss


def loss_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any, denominator: Any) -> float:
    loss = (model(x) - y).square().sum() / denominator
    for parameter, gradient in zip(
        model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
    ):
        parameter.grad = gradient
    return float(loss.item())


def loss_alone(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any, denominator: Any) -> Any:
    optimizer.zero_grad()
    return (model(x) - y).square().sum() / denominator


CASES = [
    (LBFGS, loss_by_backward),
    (functools.partial(LBFGS, line_search_fn="strong_wolfe"), loss_by_hand),
    (functools.partial(CallsBackward, lr=0.1), loss_alone),
]


def train(parts: Parts, loss: Callable[..., Any], x: torch.Tensor, y: torch.Tensor, denominator: Any) -> Any:
    (optimizer,) = parts.optimizers
    return optimizer.step(lambda: loss(parts.model, optimizer, x, y, denominator))


@pytest.mark.parametrize(("make", "loss"), CASES)
def test_an_optimizer_with_a_closure_does_what_it_does_alone(
    make: Callable[..., torch.optim.Optimizer], loss: Callable[..., Any]
) -> None:
    """With 4 rows the third of three replicas has none."""
    for world_size, num_rows, op in ((2, 31, ReduceOp.MEAN), (3, 4, ReduceOp.SUM)):
        _check_closure(make, loss, world_size, num_rows, op)


def _check_closure(
    make: Callable[..., torch.optim.Optimizer], loss: Callable[..., Any], world_size: int, num_rows: int, op: ReduceOp
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    x, y = X[:num_rows], Y[:num_rows]

    def parts_of(model: nn.Module) -> Parts:
        return Parts(model, [make(model.parameters())], torch.amp.GradScaler("cpu", enabled=False))

    def body(group: Communicator) -> nn.Module:
        parts = parts_of(copy.deepcopy(model))
        peers = connected(group, parts, 300)
        cut = pieces(num_rows, world_size)
        counts = tuple(len(x[piece]) for piece in cut)
        mine = cut[group.rank] if counts[group.rank] else slice(0, 2)
        context = ReplicaContext(ReplicaView(("cpu",) * world_size), peers)
        for _ in range(2):
            with peers.run(counts, op, padding=True, param_sync_every=1), enter_replica(context):
                denominator = num_rows if op is ReduceOp.SUM else len(x[mine])
                train(parts, loss, x[mine], y[mine], denominator)
        return parts.model

    replicas = run_ranks(world_size, body)
    alone = parts_of(copy.deepcopy(model))
    for _ in range(2):
        train(alone, loss, x, y, num_rows)
    for replica in replicas:
        for parameter, expected in zip(replica.parameters(), alone.model.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected, rtol=1e-8, atol=1e-9)
