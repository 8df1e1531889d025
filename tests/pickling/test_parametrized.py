"""Modules whose tensors are computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from raydist.pickling.parametrized import match_class, reduce_parametrized
from tests.mirroring.in_process import Mirror, linear


class Double(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def doubled(mirror: Mirror) -> Any:
    layer = linear(mirror)
    with mirror.scope():
        parametrize.register_parametrization(layer, "weight", Double())
    return layer


def test_parametrized_before_the_first_step() -> None:
    mirror = Mirror()
    layer = doubled(mirror)
    assert mirror.run(lambda: (layer(torch.ones(2)).item(), parametrize.is_parametrized(layer))) == [(6.0, True)] * 2
    mirror.run(lambda: layer.parametrizations.weight.original.data.add_(1).sum())
    assert layer.weight.tolist() == [[4.0, 6.0]]
    assert [len(replica.parameters()) for replica in mirror.replicas] == [1, 1]


def test_parametrized_after_the_first_step_and_removed_again() -> None:
    mirror = Mirror()
    layer: Any = linear(mirror)
    value = lambda: layer(torch.ones(2)).item()  # noqa: E731
    assert mirror.run(value) == [3.0, 3.0]
    with mirror.scope():
        parametrize.register_parametrization(layer, "weight", Double())
    assert mirror.run(value) == [6.0, 6.0]
    assert type(layer).__name__ == "ParametrizedLinear"
    with mirror.scope():
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    assert mirror.run(value) == [3.0, 3.0]
    assert mirror.run(lambda: type(layer)) == [nn.Linear] * 2
    mirror.driver.release()
    assert type(layer) is nn.Linear


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_ready_made(norm: Any) -> None:
    mirror = Mirror()
    with mirror.scope():
        layer = norm(nn.Linear(2, 2))
    results = mirror.run(lambda: layer(torch.ones(2)).detach())
    torch.testing.assert_close(results[1], layer(torch.ones(2)).detach())


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_read_after_a_step_changed_an_attribute_or_failed(norm: Any) -> None:
    mirror = Mirror()
    with mirror.scope():
        model: Any = nn.Sequential(norm(nn.Linear(2, 2)), norm(nn.Linear(2, 2)))
    mirror.run(lambda: model.eval() and None)
    assert not model[0].training
    mirror.driver.reset()
    for layer in model:
        assert type(layer).__name__ == "ParametrizedLinear"
        assert layer.weight.shape == (2, 2)
    values = mirror.run(lambda: model[1].weight.detach())
    torch.testing.assert_close(values[1], model[1].weight.detach())
    mirror.driver.release()
    assert type(model[0]).__bases__ == (nn.Linear,)


def test_reduction_and_class() -> None:
    layer: Any = nn.Linear(2, 1)
    assert reduce_parametrized(layer) is None
    assert reduce_parametrized(3) is None
    parametrize.register_parametrization(layer, "weight", Double())
    reduced = reduce_parametrized(layer)
    assert reduced is not None
    twin = reduced[0](*reduced[1])
    assert type(twin) is nn.Linear
    reduced[5](twin, reduced[2])
    assert torch.equal(twin.weight, layer.weight)
    match_class(twin)
    assert type(twin).__bases__ == (nn.Linear,)
