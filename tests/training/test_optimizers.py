from __future__ import annotations

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.training.optimizers import optimizer_by_name, require_optimizer


def test_parameters_of_the_model_and_of_its_loss_may_be_trained() -> None:
    module, loss = nn.Linear(2, 1), nn.Linear(1, 1)
    require_optimizer(torch.optim.SGD([*module.parameters(), *loss.parameters()], lr=0.1), module, loss)


def test_others_are_refused() -> None:
    module, other = nn.Linear(2, 1), nn.Linear(3, 1)
    with pytest.raises(rd.InvalidArgumentError, match=r"2 of its 2 are not among them, .* shape \(1, 3\)"):
        require_optimizer(torch.optim.SGD(other.parameters(), lr=0.1), module, nn.MSELoss())
    with pytest.raises(rd.InvalidArgumentError, match="must be a torch.optim.Optimizer, got 'sgd'"):
        require_optimizer("sgd", module, nn.MSELoss())


@pytest.mark.parametrize(
    ("name", "kind"),
    [("adam", "Adam"), ("AdamW", "AdamW"), ("rms_prop", "RMSprop"), ("SGD", "SGD"), ("nadam", "NAdam")],
)
def test_a_name_is_a_class_of_torchs_over_all_parameters(name: str, kind: str) -> None:
    module = nn.Linear(2, 1)
    optimizer = optimizer_by_name(name, module)
    assert type(optimizer) is getattr(torch.optim, kind)
    assert optimizer.param_groups[0]["params"] == list(module.parameters())


def test_names_of_others_and_modules_without_parameters_are_refused() -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"got 'adan'\. Did you mean 'Adam'\? There are: ASGD, "):
        optimizer_by_name("adan", nn.Linear(2, 1))
    with pytest.raises(rd.InvalidArgumentError, match="'adam' needs parameters to optimise, got a Tanh without any"):
        optimizer_by_name("adam", nn.Tanh())


@pytest.mark.parametrize("name", sorted(name for name, kind in vars(torch.optim).items() if isinstance(kind, type)))
def test_each_name_trains_an_ordinary_network_or_says_why_not(name: str) -> None:
    if name == "Optimizer":
        return
    model = rd.Model(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)))
    reasons = {
        "Muon": r"Muon takes matrices, .*, got 2 others of 4: 0.bias \(4,\), 1.bias \(1,\)\. Use \"adamw\" for all",
        "SparseAdam": "SparseAdam takes parameters with sparse gradients, .*, got 4 others of 4: 0.weight",
        "LBFGS": "got LBFGS, which asks for the loss several times",
    }
    if name in reasons:
        with pytest.raises(rd.InvalidArgumentError, match=reasons[name]):
            model.compile(name, "mse")
        return
    model.compile(name, "mse")
    model.fit(torch.randn(4, 3), torch.randn(4, 1), verbose=False)


def test_optimizers_of_some_parameters_by_their_names() -> None:
    assert type(optimizer_by_name("muon", nn.Linear(2, 3, bias=False))) is torch.optim.Muon
    assert type(optimizer_by_name("sparse_adam", nn.Embedding(3, 2, sparse=True))) is torch.optim.SparseAdam
    module = nn.Linear(2, 1)
    with pytest.raises(rd.InvalidArgumentError, match="got LBFGS"):
        require_optimizer(torch.optim.LBFGS(module.parameters()), module, nn.MSELoss())
