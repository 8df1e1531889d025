"""Optimizer states: fetched when somebody looks, sent when somebody writes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from raydist.core.errors import FailedPreconditionError
from tests.mirroring.in_process import Mirror, linear


@pytest.fixture
def trained() -> tuple[Mirror, nn.Linear, torch.optim.Optimizer, Callable[[], float]]:
    """Momentum 0.5 and constant gradients of 1, after one step."""
    mirror = Mirror()
    layer = linear(mirror)
    with mirror.scope():
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, momentum=0.5)

    def step() -> float:
        optimizer.zero_grad()
        layer(torch.ones(2)).sum().backward()
        optimizer.step()
        return float(optimizer.state[layer.weight]["momentum_buffer"][0, 0])

    mirror.run(step)
    return mirror, layer, optimizer, step


Trained = tuple[Mirror, nn.Linear, torch.optim.Optimizer, Callable[[], float]]


def test_state_dict_is_fresh(trained: Trained) -> None:
    mirror, _, optimizer, step = trained
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].tolist() == [[1.0, 1.0]]
    mirror.run(step)
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].tolist() == [[1.5, 1.5]]


def test_state_is_keyed_by_the_drivers_parameter(trained: Trained) -> None:
    _, layer, optimizer, _ = trained
    assert list(optimizer.state) == [layer.weight]


def test_learning_rate_does_not_fetch_the_state(trained: Trained) -> None:
    mirror, _, optimizer, _ = trained
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.zero_grad()
    assert "collect_optimizer_state" not in mirror.link.calls


def test_reading_sends_nothing(trained: Trained) -> None:
    mirror, _, optimizer, step = trained
    optimizer.state_dict()
    mirror.run(step)
    assert mirror.bytes_of_last["writes"] == 0


def test_state_written_in_place(trained: Trained) -> None:
    mirror, layer, optimizer, step = trained
    optimizer.state[layer.weight]["momentum_buffer"].zero_()
    assert mirror.run(step) == [1.0, 1.0]


def test_state_written_past_torch(trained: Trained) -> None:
    mirror, layer, optimizer, step = trained
    optimizer.state[layer.weight]["momentum_buffer"].data.zero_()
    assert mirror.run(step) == [1.0, 1.0]
    optimizer.state[layer.weight]["momentum_buffer"].numpy()[:] = 3
    assert mirror.run(step) == [2.5, 2.5]
    assert mirror.run(step) == [2.25, 2.25]
    assert mirror.bytes_of_last["writes"] == 0


def test_load_state_dict(trained: Trained) -> None:
    mirror, layer, optimizer, step = trained
    saved = copy.deepcopy(optimizer.state_dict())
    mirror.run(step)
    optimizer.load_state_dict(saved)
    assert mirror.run(step) == [1.5, 1.5]
    assert mirror.run(lambda: optimizer.param_groups[0]["params"][0] is layer.weight) == [True, True]


def test_load_state_dict_before_the_first_step(mirror: Mirror, layer: nn.Linear) -> None:
    with mirror.scope():
        optimizer = torch.optim.Adam(layer.parameters(), lr=1.0)
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    counts = mirror.run(lambda: (optimizer.state[layer.weight]["step"].item(), len(optimizer.state)))
    assert counts == [(1.0, 1)] * 2


def test_write_through_a_kept_reference_is_refused(trained: Trained) -> None:
    mirror, layer, optimizer, step = trained
    momentum = optimizer.state[layer.weight]["momentum_buffer"]
    mirror.run(step)
    momentum.zero_()
    with pytest.raises(FailedPreconditionError, match="states of SGD must be read"):
        mirror.run(step)
    assert optimizer.state[layer.weight]["momentum_buffer"].tolist() == [[1.5, 1.5]]
    assert mirror.run(step) == [1.75, 1.75]


def test_final_state_after_release(trained: Trained) -> None:
    mirror, layer, optimizer, _ = trained
    mirror.driver.release()
    assert optimizer.state[layer.weight]["momentum_buffer"].tolist() == [[1.0, 1.0]]
    assert layer.weight.tolist() == [[0.0, 1.0]]
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    assert layer.weight.tolist() == [[-1.5, -0.5]]
