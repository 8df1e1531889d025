"""Gradients on the driver."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from raydist.core.errors import FailedPreconditionError
from tests.mirroring.in_process import Mirror, linear

Trained = tuple[Mirror, nn.Linear, torch.optim.Optimizer]


@pytest.fixture
def trained() -> Trained:
    """After a backward pass on the replicas that left gradients of 1."""
    mirror = Mirror()
    layer = linear(mirror)
    with mirror.scope():
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)

    def backward() -> bool:
        layer(torch.ones(2)).sum().backward()
        return isinstance(optimizer, torch.optim.SGD)

    mirror.run(backward)
    return mirror, layer, optimizer


def gradients(mirror: Mirror, layer: nn.Linear) -> list[object]:
    return mirror.run(lambda: None if layer.weight.grad is None else layer.weight.grad.tolist())


def test_read_and_set_without_reading_the_old_one(trained: Trained) -> None:
    mirror, layer, _ = trained
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[1.0, 1.0]]
    mirror.run(lambda: layer.weight.grad.mul_(3).sum())  # type: ignore[union-attr]
    assert layer.weight.grad.tolist() == [[3.0, 3.0]]
    mirror.run(lambda: layer.weight.grad.mul_(3).sum())  # type: ignore[union-attr]
    layer.weight.grad = torch.full((1, 2), 4.0)
    assert layer.weight.grad.tolist() == [[4.0, 4.0]]
    assert gradients(mirror, layer) == [[[4.0, 4.0]]] * 2
    mirror.run(lambda: layer.zero_grad())
    assert layer.weight.grad is None
    alias = layer.weight.detach()
    layer(torch.ones(2)).sum().backward()
    alias.grad = None
    alias.requires_grad_(False)
    assert gradients(mirror, layer) == [[[1.0, 1.0]]] * 2
    layer.weight.grad = None
    assert gradients(mirror, layer) == [None, None]


def test_writes_that_torch_does_not_count(trained: Trained) -> None:
    mirror, layer, _ = trained
    weight: Any = layer.weight
    weight.grad.data.mul_(2)
    assert gradients(mirror, layer) == [[[2.0, 2.0]]] * 2
    weight.grad.numpy()[0, 1] = float("nan")
    assert mirror.run(lambda: weight.grad.isnan().tolist()) == [[[False, True]]] * 2
    weight.grad.detach().fill_(5)
    assert gradients(mirror, layer) == [[[5.0, 5.0]]] * 2
    torch.nn.utils.clip_grad_value_(layer.parameters(), 0.5)
    assert gradients(mirror, layer) == [[[0.5, 0.5]]] * 2
    mirror.run(lambda: layer.training)
    assert mirror.bytes_of_last["writes"] == 0


def test_zero_grad_on_the_driver_costs_no_fetch(trained: Trained) -> None:
    mirror, layer, optimizer = trained
    assert hasattr(optimizer, "zero_grad")
    clear = layer.zero_grad  # reading the attribute clears nothing
    optimizer.zero_grad(set_to_none=False)
    assert gradients(mirror, layer) == [[[0.0, 0.0]]] * 2
    layer.zero_grad(set_to_none=False)
    assert gradients(mirror, layer) == [[[0.0, 0.0]]] * 2
    assert mirror.run(lambda: clear.__name__) == ["zero_grad"] * 2  # travels as the method of that name
    mirror.run(lambda: layer(torch.ones(2)).sum().backward())
    mirror.link.calls.clear()
    optimizer.zero_grad()
    assert gradients(mirror, layer) == [None, None]
    mirror.run(lambda: layer(torch.ones(2)).sum().backward())
    clear()
    assert gradients(mirror, layer) == [None, None]
    assert "collect_gradients" not in mirror.link.calls


def test_one_gradient_set_to_none_by_the_program_or_by_a_zero_grad_of_its_own() -> None:
    class Kept(nn.Linear):
        def zero_grad(self, set_to_none: bool = True) -> None:
            self.bias.grad = None

    mirror = Mirror()
    with mirror.scope():
        layer = Kept(2, 1)
    mirror.run(lambda: layer(torch.ones(2)).sum().backward())
    layer.zero_grad()
    assert gradients(mirror, layer) == [[[1.0, 1.0]]] * 2
    assert mirror.run(lambda: layer.bias.grad) == [None, None]
    mirror.run(lambda: layer(torch.ones(2)).sum().backward())
    layer.weight.grad = None
    assert layer.bias.grad is not None
    assert layer.weight.grad is None  # also after the other one was read
    assert gradients(mirror, layer) == [None, None]


def test_hook_after_the_first_step_and_its_removal(trained: Trained) -> None:
    mirror, layer, _ = trained

    def backward() -> None:
        layer.zero_grad()
        layer(torch.ones(2)).sum().backward()

    handle = layer.weight.register_hook(lambda gradient: gradient * 10)
    mirror.run(backward)
    assert gradients(mirror, layer) == [[[10.0, 10.0]]] * 2
    mirror.run(backward)
    assert mirror.bytes_of_last["writes"] == 0
    handle.remove()
    mirror.run(backward)
    assert gradients(mirror, layer) == [[[1.0, 1.0]]] * 2
    mirror.driver.release()
    layer.weight.register_hook(lambda gradient: gradient * 10)
    backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[10.0, 10.0]]


@pytest.mark.parametrize("after_a_step", [False, True])
def test_optimizer_that_only_a_hook_reaches(after_a_step: bool, mirror: Mirror, layer: nn.Linear) -> None:
    backward = lambda: layer(torch.ones(2)).sum().backward()  # noqa: E731
    with mirror.scope():
        optimizers: dict[Any, Any] = {p: torch.optim.SGD([p], lr=1.0) for p in layer.parameters()}
    if after_a_step:
        mirror.run(lambda: layer.training)

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    mirror.run(backward)
    assert layer.weight.tolist() == [[0.0, 1.0]]
    optimizers[layer.weight].param_groups[0]["lr"] = 0.5
    mirror.run(backward)
    assert mirror.run(lambda: layer.weight.tolist()) == [[[-0.5, 0.5]]] * 2
    mirror.driver.reset()
    mirror.run(backward)
    assert mirror.run(lambda: layer.weight.tolist()) == [[[-1.0, 0.0]]] * 2
    assert gradients(mirror, layer) == [None, None]


def test_hooks_and_gradients_survive_a_reset(mirror: Mirror, layer: nn.Linear) -> None:
    layer.weight.register_hook(lambda gradient: gradient * 10)  # before the first step, on a frozen parameter
    layer.weight.requires_grad_(False)
    mirror.run(lambda: layer.training)
    layer.weight.requires_grad_(True)
    mirror.run(lambda: layer.weight.register_hook(lambda gradient: gradient + 1) and None)
    mirror.driver.reset()
    mirror.run(lambda: layer(torch.ones(2)).sum().backward())
    assert gradients(mirror, layer) == [[[11.0, 11.0]]] * 2
    mirror.driver.reset()
    assert gradients(mirror, layer) == [[[11.0, 11.0]]] * 2
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[11.0, 11.0]]


@pytest.mark.parametrize("after_a_step", [False, True])
def test_hook_that_cannot_travel_is_an_error(after_a_step: bool, mirror: Mirror, layer: nn.Linear) -> None:
    lock = threading.Lock()
    if after_a_step:
        mirror.run(lambda: layer.training)
    layer.weight.register_hook(lambda gradient: gradient * lock.locked())
    with pytest.raises(FailedPreconditionError, match="closure variable 'lock'.*: _thread.lock"):
        mirror.run(lambda: layer.training)


def test_a_cast_on_the_driver_takes_gradients_along(trained: Trained) -> None:
    mirror, layer, _ = trained
    layer.double()
    assert gradients(mirror, layer) == [[[1.0, 1.0]]] * 2
    assert mirror.run(lambda: layer.weight.grad.dtype) == [torch.float64] * 2  # type: ignore[union-attr]
    layer.half()
    layer.double()
    mirror.run(lambda: layer(torch.ones(2).double()).sum().backward())
    assert gradients(mirror, layer) == [[[2.0, 2.0]]] * 2
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is torch.float64


def test_sparse_gradients_are_read_and_written(mirror: Mirror) -> None:
    with mirror.scope():
        table = nn.Embedding(4, 2, sparse=True)
    mirror.run(lambda: table(torch.tensor([1, 1])).sum().backward())
    gradient = table.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    assert gradient.to_dense().tolist() == [[0.0, 0.0], [2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]
    table.weight.grad = gradient * 3
    assert mirror.run(lambda: table.weight.grad.to_dense().sum().item()) == [12.0, 12.0]  # type: ignore[union-attr]


def test_backward_on_the_driver_accumulates(mirror: Mirror, layer: nn.Linear) -> None:
    early = layer(torch.tensor([5.0, 6.0])).sum()  # a graph from before the first step
    layer.weight.grad = torch.full((1, 2), 4.0)
    mirror.run(lambda: layer(torch.ones(2)).sum().backward())
    assert layer.weight.grad.tolist() == [[5.0, 5.0]]
    early.backward()
    assert gradients(mirror, layer) == [[[10.0, 11.0]]] * 2
    loss = layer(torch.tensor([5.0, 6.0])).sum()
    mirror.run(lambda: layer(torch.ones(2)).sum().backward())
    loss.backward()
    assert gradients(mirror, layer) == [[[16.0, 18.0]]] * 2
    layer(torch.tensor([1.0, 2.0])).sum().backward()
    assert gradients(mirror, layer) == [[[17.0, 20.0]]] * 2


def test_backward_after_the_release_sends_nothing(trained: Trained) -> None:
    mirror, layer, _ = trained
    loss = layer(torch.ones(2)).sum()
    mirror.driver.release()
    mirror.link.calls.clear()
    loss.backward()
    layer(torch.ones(2)).sum().backward()
    assert not mirror.link.calls
    assert not layer.weight._backward_hooks


def test_gradients_fetched_during_a_dispatched_step_are_fetched_again(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, layer, _ = trained
    weight: Any = layer.weight
    mirror.dispatch_within(monkeypatch, "collect_gradients", lambda: mirror.run(lambda: weight.grad.mul_(3).sum()))
    assert [weight.grad.tolist() for _ in range(2)] == [[[1.0, 1.0]], [[3.0, 3.0]]]
    mirror.run(lambda: layer(torch.ones(2)).sum().backward())
    assert mirror.bytes_of_last["writes"] == 0  # gradients that are only read are not sent
    assert mirror.link.calls.count("collect_gradients") == 2
