"""One state of the optimizers: what `CentralStorageStrategy` promises beyond the contract, on real replicas."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

OnReplicas = Callable[[int], rd.CentralStorageStrategy]


@pytest.fixture
def two(central: OnReplicas) -> rd.CentralStorageStrategy:
    return central(2)


def test_only_the_first_replica_has_a_state(two: rd.CentralStorageStrategy) -> None:
    with two.scope():
        model = nn.Linear(300, 300)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for batch in two.distribute_dataset(rd.Dataset.from_tensor_slices(torch.ones(8, 300)).batch(4)):
        two.run(step, args=(batch,))
    assert two.local_results(two.run(lambda: len(optimizer.state))) == (2, 0)
    one, other = two.local_results(two.run(lambda: model.weight.detach().clone()))
    assert torch.equal(one, other)
    assert optimizer.state[model.weight]["step"] == 2


def train_with_a_closure(strategy: rd.Strategy) -> list[float]:
    torch.manual_seed(5)
    with strategy.scope():
        model = nn.Linear(2, 1).double()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)

    def step(x: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            mean: torch.Tensor = rd.get_replica_context().all_reduce("MEAN", loss.detach())
            return mean  # the same on all replicas

        optimizer.step(closure)

    rows = torch.tensor([[1.0, 2.0], [0.5, -1.0], [2.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    for batch in strategy.distribute_dataset(rd.Dataset.from_tensor_slices(rows).batch(4).repeat(3)):
        strategy.run(step, args=(batch,))
    found: list[float] = model.weight.flatten().tolist()
    return found


def train_two_optimizers(strategy: rd.Strategy) -> list[float]:
    """Each has a part of the model; one accumulates, and the driver changes a learning rate."""
    torch.manual_seed(6)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        first = torch.optim.Adam(model[0].parameters(), lr=0.1)
        last = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, index: int) -> None:
        model(x.double()[:, None]).square().mean().backward()
        first.step()
        first.zero_grad()
        if index % 2:
            last.step()
            last.zero_grad()

    for index, batch in enumerate(strategy.distribute_dataset(rd.Dataset.range(13).batch(3))):
        strategy.run(step, args=(batch, index))
        first.param_groups[0]["lr"] *= 0.5
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def train_in_a_loop(strategy: rd.Strategy) -> list[float]:
    """The loop is in the replicas; gradients of two batches are exchanged at once, and weights clipped by hand."""
    torch.manual_seed(8)
    with strategy.scope():
        model = nn.Linear(1, 2).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def epoch(batches: Any) -> None:
        context = rd.get_replica_context()
        for index, x in enumerate(batches):
            with context.no_sync() if index % 2 == 0 else contextlib.nullcontext():
                model(x.double()[:, None]).square().mean().backward()
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    model.weight.clamp_(-0.5, 0.5)

    data = strategy.distribute_dataset(rd.Dataset.range(12).batch(3))
    for _ in range(2):
        strategy.run(epoch, args=(iter(data),))
    found: list[float] = model.weight.flatten().tolist()
    return found


def test_one_copy_trains_what_one_device_trains(two: rd.CentralStorageStrategy) -> None:
    for train in (train_two_optimizers, train_in_a_loop, train_with_a_closure):
        alone = train(rd.OneDeviceStrategy("cpu"))
        assert all(map(math.isfinite, alone))
        assert train(two) == pytest.approx(alone, rel=1e-9, abs=1e-12), train.__name__


def test_replicas_that_write_different_values_or_step_alone_are_told(two: rd.CentralStorageStrategy) -> None:
    with two.scope():
        weight = nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([weight], lr=0.1)

    def differ() -> None:
        weight.data.fill_(float(rd.get_replica_context().replica_id_in_sync_group))

    two.run(differ, options=rd.RunOptions(param_sync_every=1))
    with pytest.raises(rd.CollectiveMismatchError, match="must train the same values"):
        weight.tolist()
    two.run(lambda: weight.data.fill_(7.0))
    assert weight.tolist() == [7.0] * 3

    def step() -> None:
        weight.sum().backward()
        if rd.get_replica_context().replica_id_in_sync_group == 0:
            optimizer.step()

    two.run(step)
    with pytest.raises(rd.CollectiveMismatchError, match="optimizer.step"):
        weight.tolist()
