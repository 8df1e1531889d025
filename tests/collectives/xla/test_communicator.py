"""What is special about groups of chips; the rest is the contract of communicators, in `tests/collectives`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from raydist.collectives.base import Communicator
from raydist.collectives.reducer.reducer import GradientReducer
from raydist.errors import CollectiveMismatchError
from raydist.values import ReduceOp
from tests.xla_world import XlaTeam

WORLD = 3


@pytest.fixture
def team(chips: None) -> Iterator[XlaTeam]:
    team = XlaTeam(WORLD, timeout_s=5.0)
    yield team
    team.close()


def differ(communicator: Communicator) -> tuple[str, float]:
    """Rank 1 brings another shape; afterwards all agree again."""
    shape = (3,) if communicator.rank == 1 else (2,)
    with pytest.raises(CollectiveMismatchError) as caught:
        communicator.all_reduce(torch.ones(shape), ReduceOp.SUM).wait()
    total = torch.ones(1)
    communicator.all_reduce(total, ReduceOp.SUM).wait()
    return str(caught.value), total.item()


def keep_signs(communicator: Communicator) -> list[float]:
    """A broadcast moves bits, though it is a sum."""
    mine = torch.tensor([-0.0, float("nan"), 1e-40]) if communicator.rank == 1 else torch.full((3,), 7.0)
    communicator.broadcast(mine, 1).wait()
    return [torch.copysign(torch.ones(1), mine[:1].cpu()).item(), float(mine[1].isnan()), mine[0].item()]


def wait_for_some(communicator: Communicator) -> list[float]:
    """Ranks wait in different orders, and for some not at all; they start the same."""
    tensors = [torch.full((2,), float(k)) for k in range(3)]
    works = [communicator.all_reduce(tensor, ReduceOp.SUM) for tensor in tensors]
    works[2 if communicator.rank else 0].wait()
    if not communicator.rank:
        works[2].wait()
    communicator.barrier()
    works[1].wait()
    return [tensors[1][0].item(), tensors[2][0].item()]


def made() -> tuple[torch.nn.Linear, torch.Tensor]:
    """A model and six rows, without random numbers: threads share their generator."""
    model = torch.nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 8).reshape(2, 4))
        model.bias.fill_(0.5)
    return model, torch.linspace(-2, 3, 24).sin().reshape(6, 4)


def train(communicator: Communicator) -> list[list[float]]:
    """Two steps of a model on rows that are not the same number on every chip."""
    with torch.device("cpu"):
        model, rows = made()
    model = model.to(communicator.device)
    first, last = ((0, 3), (3, 5), (5, 6))[communicator.rank]
    mine = rows[first:last].to(communicator.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reducer = GradientReducer(communicator)
    reducer.attach(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        with reducer.step(weight=len(mine) / 6):
            model(mine).square().mean().backward()
        optimizer.step()
    reducer.close()
    return [parameter.detach().cpu().tolist() for parameter in model.parameters()]


def trained_alone() -> list[list[float]]:
    model, rows = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
    return [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.timeout(120)
def test_gradients_of_chips_are_global_after_backward(team: XlaTeam) -> None:
    for weight, bias in team.run(train):
        expected = trained_alone()
        np.testing.assert_allclose(weight, expected[0], atol=1e-6)
        np.testing.assert_allclose(bias, expected[1], atol=1e-6)


@pytest.mark.timeout(120)
def test_groups_of_chips(team: XlaTeam) -> None:
    for message, total in team.run(differ):
        assert "rank 1: all_reduce(SUM) of torch.float32 (3,); " in message
        assert "rank 1 differs from the others" in message
        assert total == WORLD
    assert team.run(keep_signs) == [[-1.0, 1.0, 0.0]] * WORLD
    assert team.run(wait_for_some) == [[1.0 * WORLD, 2.0 * WORLD]] * WORLD
