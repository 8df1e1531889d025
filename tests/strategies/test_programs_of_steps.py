"""Programs that change globals, types of parameters, hooks or process groups train as on one device (I1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn

import raydist as rd

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

SCALE = 1.0
TABLE = {"offset": 0.0}


def scaled(value: float) -> float:
    return value * SCALE


def read(strategy: rd.Strategy, step: Any) -> float:
    first, second = strategy.local_results(strategy.run(step))
    assert first == second
    return float(first)


def test_globals_of_a_step_and_of_its_helper(two: rd.MirroredStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    with two.scope():
        weight = torch.nn.Parameter(torch.tensor(2.0))

    def step() -> float:
        return scaled(weight.item()) + SCALE + TABLE["offset"]

    def helper(value: float) -> float:
        return scaled(value)

    def enclosing(factor: float = 1.0) -> float:
        return helper(weight.item()) * factor

    assert (read(two, step), read(two, enclosing)) == (3.0, 2.0)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert (read(two, step), read(two, enclosing)) == (9.0, 6.0)
    monkeypatch.setitem(TABLE, "offset", 1.0)
    assert read(two, step) == 10.0
    enclosing.__defaults__ = (2.0,)
    assert read(two, enclosing) == 12.0


def trained(strategy: rd.Strategy) -> list[Any]:
    """Weights after steps in float32 and float64."""
    with strategy.scope():
        torch.manual_seed(3)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x.to(model.weight.dtype)).square().mean().backward()
        optimizer.step()

    x = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
    found = []
    for change in (lambda: None, model.double, lambda: None, model.float):
        change()
        strategy.run(step, args=(x,))
        found.append((model.weight.dtype, model.weight.detach().tolist()))
    return found


def test_a_model_is_cast_between_steps(two: rd.MirroredStrategy) -> None:
    for (dtype, weight), (expected, alone) in zip(trained(two), trained(rd.OneDeviceStrategy("cpu")), strict=True):
        assert dtype is expected
        assert torch.allclose(torch.tensor(weight), torch.tensor(alone), atol=1e-6)


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


def is_open() -> bool:
    return distributed.is_initialized()


def close_group() -> bool:
    """Close the group; a caller that reads the result waits until both replicas have closed it."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
    return not is_open()


def sum_of_ranks() -> float:
    total = torch.tensor(float(rd.get_replica_context().replica_id_in_sync_group + 1))
    distributed.all_reduce(total)
    return total.item()


def test_a_group_of_torch_lasts_from_step_to_step_beside_the_collectives_of_replicas(
    two: rd.MirroredStrategy, tmp_path: Path
) -> None:
    with two.scope():
        weight = nn.Parameter(torch.zeros(()))

    def open_group() -> bool:
        context = rd.get_replica_context()
        rank, size = context.replica_id_in_sync_group, context.num_replicas_in_sync
        distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=size)
        return is_open()

    def both() -> tuple[float, float, float]:
        context = rd.get_replica_context()
        weight.grad = None
        (weight * (context.replica_id_in_sync_group + 1)).backward()
        assert weight.grad is not None
        return sum_of_ranks(), float(context.all_reduce("SUM", 5.0)), weight.grad.item()

    def fail() -> int:
        context = rd.get_replica_context()
        if context.replica_id_in_sync_group == 1:
            raise KeyError("on purpose")
        return int(context.all_reduce("SUM", 1))

    try:
        assert two.run(open_group).values == (True, True)
        for _ in range(2):
            assert [each.values for each in two.run(both)] == [(3.0, 3.0), (10.0, 10.0), (1.5, 1.5)]
        with pytest.raises(KeyError, match="on purpose"):
            two.local_results(two.run(fail))
        assert [each.values for each in two.run(both)] == [(3.0, 3.0), (10.0, 10.0), (1.5, 1.5)]
    finally:
        assert two.run(close_group).values == (True, True)
