"""One state of the optimizers: what `CentralStorageStrategy` promises beyond the contract, on real replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


@pytest.fixture
def two(central: Callable[[int], rd.CentralStorageStrategy]) -> rd.CentralStorageStrategy:
    return central(2)


class Counting(torch.optim.SGD):
    """Counts its steps, and returns the count."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        (weight,) = self.param_groups[0]["params"]
        state = self.state[weight]
        state["count"] = state.get("count", torch.tensor(0)) + 1
        return f"step {int(state['count'])}"


def test_the_first_replica_steps_for_all_until_a_closure_needs_every_state(two: rd.CentralStorageStrategy) -> None:
    with two.scope():
        weight = nn.Parameter(torch.arange(6.0).view(3, 2).t())  # its rows do not lie in order
        optimizer = Counting([weight], lr=1.0)

    def step(*closure: Callable[[], None]) -> tuple[Any, ...]:
        weight.grad = torch.ones_like(weight)
        version = weight._version
        told = optimizer.step(*closure)
        return [told, len(optimizer.state), weight._version > version, weight.stride(), weight.tolist()], None

    for number, states in ((1, (1, 0)), (2, (1, 0))):
        found, none = two.run(step)
        rows = [[column - number for column in row] for row in ([0.0, 2.0, 4.0], [1.0, 3.0, 5.0])]
        assert none is None
        assert two.local_results(found) == tuple([f"step {number}", size, True, (1, 2), rows] for size in states)
        assert optimizer.state[weight]["count"] == number
    told = two.run(lambda: (step(lambda: None), int(optimizer.state[weight]["count"])))[1]
    assert two.local_results(told) == (3, 3)


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


def test_a_closure_trains_what_it_trains_on_one_device(two: rd.CentralStorageStrategy) -> None:
    alone = train_with_a_closure(rd.OneDeviceStrategy("cpu"))
    assert train_with_a_closure(two) == pytest.approx(alone, rel=1e-9, abs=1e-12)


def test_replicas_that_write_different_values_or_step_other_optimizers_are_told(two: rd.CentralStorageStrategy) -> None:
    with two.scope():
        weight = nn.Parameter(torch.zeros(3))
        optimizers = [torch.optim.SGD([weight], lr=0.1), torch.optim.Adam([weight], lr=0.1)]

    def differ() -> None:
        weight.data.fill_(float(rd.get_replica_context().replica_id_in_sync_group))

    two.run(differ, options=rd.RunOptions(param_sync_every=1))
    with pytest.raises(rd.CollectiveMismatchError, match="must train the same values"):
        weight.tolist()
    two.run(lambda: weight.data.fill_(7.0))
    assert weight.tolist() == [7.0] * 3

    def step(number_of_others: int) -> None:
        weight.sum().backward()
        for optimizer in optimizers[rd.get_replica_context().replica_id_in_sync_group :][:number_of_others]:
            optimizer.step()

    two.run(step, args=(1,))
    with pytest.raises(rd.CollectiveMismatchError, match=r"replica 0: \S+ of SGD \d; replica 1: \S+ of Adam \d"):
        weight.tolist()
    two.run(step, args=(2,))  # the first replica steps both, the other one its own
    with pytest.raises(rd.CollectiveMismatchError, match="optimizer.step"):
        weight.tolist()
