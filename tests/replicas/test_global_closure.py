"""Closures of optimizers: what they return is the loss over the rows of all replicas."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from raydist.collectives.base import Communicator
from raydist.context.current import enter_replica
from raydist.context.replica_context import ReplicaContext
from raydist.core.values import ReduceOp
from raydist.replicas.replica_view import ReplicaView
from raydist.replicas.sync_peers import GlobalClosure
from tests.collectives.models import pieces
from tests.collectives.threads import run_ranks
from tests.contracts.exchange_program import Parts, connected

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(31, 4, dtype=torch.float64, generator=GENERATOR)
Y = torch.sin(X).sum(1, keepdim=True)
LBFGS = functools.partial(torch.optim.LBFGS, lr=0.5, max_iter=8)


class Sharpness(torch.optim.SGD):
    """Climbs, asks its closure for the gradient there, and steps from where it was."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        ask = torch.enable_grad()(closure)
        loss = ask()
        parameters = [p for group in self.param_groups for p in group["params"]]
        climbs = [0.01 * float(torch.as_tensor(loss).detach()) * p.grad.clone() for p in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, climbs)
            ask()
            torch._foreach_sub_(parameters, climbs)
        super().step()
        return loss


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
    (functools.partial(LBFGS, line_search_fn="strong_wolfe"), loss_by_backward),
    (functools.partial(LBFGS, line_search_fn="strong_wolfe"), loss_by_hand),
    (functools.partial(Sharpness, lr=0.1), loss_by_backward),
    (functools.partial(Sharpness, lr=0.1), loss_by_hand),
    (functools.partial(CallsBackward, lr=0.1), loss_alone),
]


def train(parts: Parts, loss: Callable[..., Any], x: torch.Tensor, y: torch.Tensor, denominator: Any) -> Any:
    (optimizer,) = parts.optimizers
    return optimizer.step(lambda: loss(parts.model, optimizer, x, y, denominator))


@pytest.mark.parametrize(("world_size", "num_rows", "op"), [(2, 31, ReduceOp.MEAN), (3, 4, ReduceOp.SUM)])
@pytest.mark.parametrize(("make", "loss"), CASES)
def test_an_optimizer_with_a_closure_does_what_it_does_alone(
    make: Callable[..., torch.optim.Optimizer],
    loss: Callable[..., Any],
    world_size: int,
    num_rows: int,
    op: ReduceOp,
) -> None:
    """With 4 rows the third of three replicas has none."""
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


def test_what_the_program_gets_is_its_own_loss() -> None:
    """Results of a step are each replica's own, and are reduced by who reads them."""
    own = torch.tensor(2.0)
    closure = GlobalClosure(lambda: own, lambda: None, lambda loss: loss * 3)
    seen = closure()
    assert seen.item() == 6.0
    assert closure.own_value(seen) is own
    assert closure.own_value(None) is None
    assert GlobalClosure(lambda: 2.0, lambda: None, lambda loss: loss * 3)() == 6.0
    assert GlobalClosure(lambda: None, lambda: None, lambda loss: loss * 3)() is None
