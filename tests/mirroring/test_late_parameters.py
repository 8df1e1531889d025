"""Parameters that come, go or are tied between two steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from raydist.core.errors import FailedPreconditionError
from tests.mirroring.in_process import Mirror


class Trained:
    """A model that every replica trains on the same rows, and its twin that no strategy knows."""

    def __init__(self, *, momentum: float = 0.9) -> None:
        self.mirror = Mirror()
        torch.manual_seed(0)
        with self.mirror.scope():
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.twin, self.model = copy.deepcopy(model), model
        with self.mirror.scope():
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=momentum)
        self.twins = torch.optim.SGD(self.twin.parameters(), lr=0.1, momentum=momentum)

    def both(self) -> list[tuple[Any, Any]]:
        return [(self.model, self.optimizer), (self.twin, self.twins)]

    def train(self) -> None:
        """One step on both, and they are equal."""
        x = torch.tensor([[1.0, 2.0], [3.0, -1.0]])

        def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.item()

        mine, optimizer = self.model, self.optimizer
        alone = step(self.twin, self.twins)
        assert self.mirror.run(lambda: step(mine, optimizer)) == [pytest.approx(alone, rel=1e-6)] * 2
        expected = self.twin.state_dict()
        found = self.model.state_dict()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, msg=f"{name} differs")


@pytest.fixture
def trained() -> Trained:
    found = Trained()
    found.train()
    return found


def test_a_parameter_registered_and_one_deleted(trained: Trained) -> None:
    for model, optimizer in trained.both():
        with trained.mirror.scope():
            model[0].register_parameter("bias", nn.Parameter(torch.tensor([0.5, -0.5])))
        optimizer.add_param_group({"params": [model[0].bias]})
        del model[1]
    trained.train()
    trained.train()
    assert "1.weight" not in trained.model.state_dict()
    mine: Any = trained.model
    with trained.mirror.scope():
        trained.model[0].register_buffer("seen", torch.tensor(0.0))
    trained.mirror.run(lambda: mine[0].seen.add_(2.0).item())
    assert trained.model.state_dict()["0.seen"].item() == 2.0


def test_weights_tied_and_untied_later(trained: Trained) -> None:
    mine: Any = trained.model
    for model, _ in trained.both():
        model[1].weight = model[0].weight
    trained.train()
    trained.train()
    assert trained.model[1].weight is trained.model[0].weight
    assert trained.mirror.run(lambda: mine[1].weight is mine[0].weight) == [True, True]
    for model, optimizer in trained.both():
        with trained.mirror.scope():
            model[1].weight = nn.Parameter(model[0].weight.detach().clone())
        optimizer.add_param_group({"params": [model[1].weight]})
    trained.train()
    assert trained.mirror.run(lambda: mine[1].weight is mine[0].weight) == [False, False]


def test_a_parametrization_registered_and_removed() -> None:
    trained = Trained(momentum=0.0)
    trained.train()
    for model, optimizer in trained.both():
        with trained.mirror.scope():
            parametrizations.weight_norm(model[0])
        originals = [model[0].parametrizations.weight.original0, model[0].parametrizations.weight.original1]
        optimizer.add_param_group({"params": originals})
    trained.train()
    trained.train()
    for model, optimizer in trained.both():
        with trained.mirror.scope():
            parametrize.remove_parametrizations(model[0], "weight")
        optimizer.param_groups.clear()
        optimizer.add_param_group({"params": list(model.parameters())})
    trained.train()


def test_a_lazy_layer_added_later(trained: Trained) -> None:
    mine: Any = trained.model
    with trained.mirror.scope():
        lazy = nn.LazyLinear(1)
        trained.model.append(lazy)
    with pytest.raises(FailedPreconditionError, match="lazy. Call the module once"):
        trained.train()
    trained.model.zero_grad()
    with trained.mirror.scope():
        trained.model(torch.ones(1, 2))
    assert trained.mirror.run(lambda: tuple(mine[2].weight.shape)) == [(1, 2), (1, 2)]
