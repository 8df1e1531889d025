from __future__ import annotations

import pytest
import torch
from torch import nn

from raydist.checkpoints.parameter_names import optimizer_entries, optimizer_state, parameter_names


def test_names_are_the_modules() -> None:
    a, b = nn.Linear(2, 1), nn.Sequential(nn.Linear(1, 1))
    loose = nn.Parameter(torch.ones(1))
    modules = {"a": a, "b": b}
    assert parameter_names(torch.optim.SGD(b.parameters()), modules) == ["0.weight", "0.bias"]
    both = torch.optim.SGD([{"params": each} for each in ([a.weight], list(b.parameters()))])
    assert parameter_names(both, modules) == ["a.weight", "b.0.weight", "b.0.bias"]
    assert parameter_names(torch.optim.SGD([loose]), modules) == ["0"]
    assert parameter_names(torch.optim.SGD([a.weight, loose]), modules) == ["a.weight", "1"]


def test_the_numbers_may_be_others_later() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam([{"params": [each]} for each in (model.weight, model.bias)])
    model(torch.ones(2)).backward()
    optimizer.step()
    entries = optimizer_entries(optimizer.state_dict(), ["weight", "bias"])
    assert entries["param_groups"][0]["params"] == ["weight"]
    turned = optimizer_state(entries, ["bias", "weight"])
    assert turned["param_groups"][0]["params"] == [1]
    assert turned["state"][1] is entries["weight"]
    with pytest.raises(KeyError, match="bias"):
        optimizer_state(entries, ["weight"])


def test_what_else_an_optimizer_keeps() -> None:
    state = {"state": {}, "param_groups": [{"params": [0]}], "rounds": 3}
    entries = optimizer_entries(state, ["a"])
    assert optimizer_state(entries, ["a"]) == state
