"""Gradients, and what is trained with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import raydist as rd
from raydist.testing.strategy_calls import GLOBAL_BATCHES, TOLERANCE, batches_of
from raydist.testing.training_program import MODELS, Program, train_alone, train_distributed

__all__ = ["check_gradient_reduction", "check_local_updates", "check_orders", "check_program", "check_training"]


def check_program(program: Program, strategy: rd.Strategy) -> None:
    """N replicas are one device on the same global batches: losses and weights are those of a bare PyTorch loop."""
    alone, distributed = train_alone(program), train_distributed(program, strategy)
    for name, value in alone.after.items():
        message = f"{name} differs from the bare loop's"
        torch.testing.assert_close(distributed.after[name], value, rtol=TOLERANCE, atol=1e-12, msg=message)
    assert distributed.losses == pytest.approx(alone.losses, rel=TOLERANCE), "losses differ from the bare loop's"
    before, after = distributed.before, distributed.after
    assert any(not torch.equal(before[name], after[name]) for name in before), "nothing was trained"


def check_training(strategy: rd.Strategy) -> None:
    """One fixed program of each model; batches and their last rest divide by no number of replicas."""
    for model in sorted(MODELS):
        program = Program(model, "adamw", num_rows=11, batch_size=4, clip=True, accumulate=2, schedule=True, seed=3)
        check_program(program, strategy)


def check_gradient_reduction(strategy: rd.Strategy) -> None:
    """MEAN weighs by rows; SUM, asked for by the scope or by one run, adds what `compute_average_loss` gives."""
    with strategy.scope():
        weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def mean(x: torch.Tensor) -> None:
        weight.grad = None
        (weight * x.double()).mean().backward()

    def share(x: torch.Tensor) -> None:
        weight.grad = None
        rd.compute_average_loss(weight * x.double()).backward()

    added = rd.RunOptions(gradient_reduce_op=rd.ReduceOp.SUM)
    for batch, rows in zip(batches_of(strategy), GLOBAL_BATCHES, strict=True):
        strategy.run(mean, args=(batch,))
        assert weight.grad is not None
        assert weight.grad.item() == pytest.approx(np.mean(rows))
        strategy.run(share, args=(batch,), options=added)
        assert weight.grad.item() == pytest.approx(np.mean(rows))


def check_orders(strategy: rd.Strategy) -> None:
    """Replicas may use their parameters in different orders: gradients meet all the same."""
    with strategy.scope():
        layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(4)).double()
    for layer in layers:
        nn.init.ones_(layer.get_parameter("weight"))

    def step(x: torch.Tensor) -> None:
        rank = rd.get_replica_context().replica_id_in_sync_group
        layers.zero_grad()
        value = x.double()[:, None]
        for index in sorted(range(4), key=lambda index: (index * 3 + rank * 2) % 5):
            value = layers[index](value)
        value.mean().backward()

    for batch, rows in zip(batches_of(strategy), GLOBAL_BATCHES, strict=True):
        strategy.run(step, args=(batch,))
        for parameter in layers.parameters():
            assert parameter.grad is not None
            assert parameter.grad.item() == pytest.approx(np.mean(rows))


def check_local_updates(strategy: rd.Strategy) -> None:
    """Gradients are the mean of this replica's rows, and none where it has none."""
    with strategy.scope():
        weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def gradient_of(x: torch.Tensor) -> tuple[float | None, list[float]]:
        weight.grad = None
        (weight * x.double()).mean().backward()
        return None if weight.grad is None else weight.grad.item(), x.double().tolist()

    options = rd.RunOptions(empty_batch="zero_rows")  # all replicas tell
    for batch in batches_of(strategy):
        for gradient, rows in strategy.local_results(strategy.run(gradient_of, args=(batch,), options=options)):
            assert gradient == (pytest.approx(np.mean(rows)) if rows else None)
