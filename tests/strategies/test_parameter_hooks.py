"""Hooks on parameters, on replicas: every one runs, sees the global gradient, and trains what one process trains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raydist as rd

pytestmark = pytest.mark.ray

ROWS = 7


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def batches() -> rd.Dataset:
    values = np.random.default_rng(0).normal(size=(3 * ROWS + 1, 4))
    return rd.Dataset.from_tensor_slices(values).batch(ROWS)


def loss_of(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(net(batch[:, :3]), batch[:, 3:])


def step_in_backward(net: nn.Module) -> dict[Any, torch.optim.Optimizer]:
    """An optimizer a parameter, stepped as soon as its gradient is there."""
    optimizers: dict[Any, torch.optim.Optimizer] = {
        parameter: torch.optim.Adam([parameter], lr=0.1) for parameter in net.parameters()
    }

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(step)
        parameter.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
    return optimizers


def trained_alone() -> nn.Module:
    net = model()
    optimizers = step_in_backward(net)
    for number, batch in enumerate(batches()):
        loss_of(net, batch).backward()
        for optimizer in optimizers.values():
            optimizer.param_groups[0]["lr"] = 0.1 / (number + 2)
    return net


def test_an_optimizer_stepped_in_backward_trains_as_one_process_does(two: rd.MirroredStrategy) -> None:
    with two.scope():
        net = model()
        optimizers = step_in_backward(net)

    def train_step(batch: torch.Tensor) -> torch.Tensor:
        loss = loss_of(net, batch)
        loss.backward()
        return loss

    for number, batch in enumerate(two.distribute_dataset(batches())):
        two.run(train_step, args=(batch,))
        for optimizer in optimizers.values():
            optimizer.param_groups[0]["lr"] = 0.1 / (number + 2)
    for parameter, expected in zip(net.parameters(), trained_alone().parameters(), strict=True):
        torch.testing.assert_close(parameter.detach(), expected.detach(), rtol=1e-9, atol=1e-12)


def test_hooks_registered_later_or_in_a_step_run_until_they_are_removed(two: rd.MirroredStrategy) -> None:
    with two.scope():
        weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def gradient(x: torch.Tensor) -> torch.Tensor | None:
        weight.grad = None
        (weight * x).mean().backward()
        return weight.grad

    def inside(x: torch.Tensor) -> torch.Tensor | None:
        handle = weight.register_hook(lambda gradient: gradient**2)
        found = gradient(x)
        handle.remove()
        return found

    (batch,) = two.distribute_dataset(rd.Dataset.from_tensor_slices(np.array([1.0, 2.0, 6.0])).batch(3))
    assert [found.item() for found in two.run(gradient, args=(batch,)).values] == [3.0, 3.0]
    assert [found.item() for found in two.run(inside, args=(batch,)).values] == [9.0, 9.0]
    handle = weight.register_hook(lambda gradient: gradient * 10)
    assert [found.item() for found in two.run(gradient, args=(batch,)).values] == [30.0, 30.0]
    handle.remove()
    assert [found.item() for found in two.run(gradient, args=(batch,)).values] == [3.0, 3.0]
