"""A model that the program casts or resizes between two steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


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
