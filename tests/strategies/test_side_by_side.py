"""Two strategies in one program: each trains as if it were alone, whatever becomes of the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

Step = Callable[..., torch.Tensor]


@pytest.fixture
def other(two: rd.MirroredStrategy) -> Iterator[rd.MirroredStrategy]:
    """A second strategy beside the shared one."""
    made = rd.MirroredStrategy(2, resources_per_replica={"CPU": 0.01})
    with made:
        yield made


def begin(scope: contextlib.AbstractContextManager[Any], seed: int) -> tuple[nn.Linear, Step]:
    """A model and what trains it; no two seeds have the same of anything."""
    with scope:
        torch.manual_seed(seed)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * seed, momentum=0.5)

    def step(batch: torch.Tensor, fails: torch.Tensor | bool = False) -> torch.Tensor:
        if fails and rd.get_replica_context().replica_id_in_sync_group == 1:
            raise KeyError("on purpose")
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step


def data(seed: int) -> rd.Dataset:
    rows = torch.randn(20, 3, generator=torch.Generator().manual_seed(seed))
    return rd.Dataset.from_tensor_slices(rows.numpy()).batch(4)


def assert_trained(model: nn.Linear, seed: int, epochs: int = 1) -> None:
    """It is what a bare loop gives."""
    bare, step = begin(contextlib.nullcontext(), seed)
    for _ in range(epochs):
        for batch in data(seed):
            step(torch.as_tensor(batch))
    trained = {name: torch.as_tensor(value) for name, value in model.state_dict().items()}
    torch.testing.assert_close(trained, dict(bare.state_dict()))


def test_steps_in_turns_train_both_and_one_that_is_closed_leaves_the_other(
    two: rd.MirroredStrategy, other: rd.MirroredStrategy
) -> None:
    (mine, step), (its, its_step) = begin(two.scope(), 1), begin(other.scope(), 2)
    distributed = two.distribute_dataset(data(1))
    for batch, its_batch in zip(distributed, other.distribute_dataset(data(2)), strict=True):
        two.run(step, args=(batch,))
        other.run(its_step, args=(its_batch,))
    assert_trained(its, 2)
    other.close()
    assert_trained(its, 2)
    for batch in distributed:
        two.run(step, args=(batch,))
    assert_trained(mine, 1, epochs=2)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_step_of_one_that_fails_is_nothing_to_the_other(
    two: rd.MirroredStrategy, other: rd.MirroredStrategy, failing: int
) -> None:
    """Steps of the other are under way when the error comes; the one that failed goes on, too."""
    strategies = (two, other)
    begun = [begin(strategy.scope(), seed) for seed, strategy in enumerate(strategies, start=1)]
    inputs = [iter(strategy.distribute_dataset(data(seed))) for seed, strategy in enumerate(strategies, start=1)]
    for number, batches in enumerate(zip(*inputs, strict=True)):
        fails = [number in (1, 3) and each == failing for each in range(2)]
        results = [
            strategy.run(step, args=(batch, torch.tensor(fail)))  # no nest depends on a tensor
            for strategy, (_, step), batch, fail in zip(strategies, begun, batches, fails, strict=True)
        ]
        if any(fails):
            with pytest.raises(KeyError, match="on purpose"):
                strategies[failing].local_results(results[failing])
            strategies[failing].run(begun[failing][1], args=(batches[failing],))
        strategies[1 - failing].local_results(results[1 - failing])
    for seed, (model, _) in enumerate(begun, start=1):
        assert_trained(model, seed)
