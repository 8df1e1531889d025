from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.checkpoints.pending_gradients import PendingGradients


def model_with_gradients() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0](torch.ones(2)).sum().backward()
    return model


def test_gradients_are_part_of_it_when_asked(tmp_path: Path) -> None:
    model = model_with_gradients()
    path = rd.Checkpoint(model=model, gradients=True).save(tmp_path / "x")
    again = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    again[1](torch.ones(2)).sum().backward()
    rd.Checkpoint(model=again, gradients=True).restore(path)
    for here, there in zip(again.parameters(), model.parameters(), strict=True):
        assert (here.grad is None) == (there.grad is None)
        assert here.grad is None or (there.grad is not None and torch.equal(here.grad, there.grad))


def test_and_not_otherwise(tmp_path: Path) -> None:
    path = rd.Checkpoint(model=model_with_gradients()).save(tmp_path / "x")
    assert sorted(each.name for each in Path(path).iterdir()) == ["manifest.json", "model.safetensors"]


def test_of_another_shape() -> None:
    model = model_with_gradients()
    with pytest.raises(rd.InvalidArgumentError, match="'0.weight' of shape \\(3,\\)"):
        PendingGradients(model).load_state_dict({"0.bias": torch.ones(2), "0.weight": torch.ones(3)})
    assert set(PendingGradients(model).state_dict()) == {"0.weight", "0.bias"}
