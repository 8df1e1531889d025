"""What a step may register in modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from raydist.errors import FailedPreconditionError
from tests.mirroring.in_process import Mirror, linear


def test_new_parameter_in_a_mirrored_module() -> None:
    mirror = Mirror()
    layer = linear(mirror)

    def step() -> None:
        layer.bias = nn.Parameter(torch.zeros(1))

    with pytest.raises(FailedPreconditionError, match="a step registered 'bias' in Linear"):
        mirror.run(step)


def test_new_submodule_in_a_mirrored_module() -> None:
    mirror = Mirror()
    layer = linear(mirror)
    with pytest.raises(FailedPreconditionError, match="a step registered 'head' in Linear"):
        mirror.run(lambda: layer.add_module("head", nn.Linear(1, 1)))


def test_what_is_allowed() -> None:
    mirror = Mirror()
    layer: Any = linear(mirror)
    other = linear(mirror)

    def step() -> int:
        own = nn.Sequential(nn.Linear(1, 1))
        layer.activation = nn.ReLU()
        layer.weight = other.weight
        layer.bias = None
        return len(list(own.parameters()))

    assert mirror.run(step) == [2, 2]
    assert layer.weight is other.weight


def test_nothing_is_watched_after_the_step() -> None:
    mirror = Mirror()
    layer = linear(mirror)
    with pytest.raises(ZeroDivisionError):
        mirror.run(lambda: layer.in_features / 0)
    assert nn.Linear(1, 1).bias is not None
