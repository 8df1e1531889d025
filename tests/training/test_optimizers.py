from __future__ import annotations

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.training.optimizers import require_optimizer


def test_parameters_of_the_model_and_of_its_loss_may_be_trained() -> None:
    module, loss = nn.Linear(2, 1), nn.Linear(1, 1)
    require_optimizer(torch.optim.SGD([*module.parameters(), *loss.parameters()], lr=0.1), module, loss)


def test_others_are_refused() -> None:
    module, other = nn.Linear(2, 1), nn.Linear(3, 1)
    with pytest.raises(rd.InvalidArgumentError, match=r"2 of its 2 are not among them, .* shape \(1, 3\)"):
        require_optimizer(torch.optim.SGD(other.parameters(), lr=0.1), module, nn.MSELoss())
    with pytest.raises(rd.InvalidArgumentError, match="must be a torch.optim.Optimizer, got 'sgd'"):
        require_optimizer("sgd", module, nn.MSELoss())
