"""A user's module class, as a program would define it."""

from __future__ import annotations

import torch
from torch import nn


class Net(nn.Module):
    """A small regression network.

    Args:
        width: Size of the hidden layer.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(2, width)
        self.out = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.out(torch.tanh(self.hidden(x)))
        return value
