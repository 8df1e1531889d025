from __future__ import annotations

from typing import Any

import pytest
import torch

from raydist.replicas.central.central_copy import StateImage, remembered, same_memories, take_state, tensors_of
from raydist.storage.placed import TensorPlace


def stepped(cls: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    optimizer = cls(parameters, **options)
    step(optimizer)
    return optimizer


def step(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def place(tensor: torch.Tensor) -> TensorPlace:
    return TensorPlace(id(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), 0)


def test_what_is_remembered_by_parameter() -> None:
    adam = stepped(torch.optim.Adam)
    assert [(number, key) for number, key, _ in remembered(adam)] == [
        (number, key) for number in (0, 1) for key in ("step", "exp_avg", "exp_avg_sq")
    ]
    assert len(tensors_of(adam)) == 6
    assert list(remembered(stepped(torch.optim.SGD, lr=0.1))) == []


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.NAdam])
def test_a_step_keeps_the_same_memories(cls: type[torch.optim.Optimizer]) -> None:
    optimizer = stepped(cls)
    before = list(remembered(optimizer))
    step(optimizer)
    assert same_memories(before, list(remembered(optimizer)))


def test_new_tensors_and_other_values_are_other_memories() -> None:
    adam = stepped(torch.optim.Adam)
    before = list(remembered(adam))
    parameter = adam.param_groups[0]["params"][0]
    adam.state[parameter]["exp_avg"] = adam.state[parameter]["exp_avg"].clone()
    assert not same_memories(before, list(remembered(adam)))
    adam.state[parameter]["exp_avg"], adam.state[parameter]["count"] = before[1][2], 1
    after = list(remembered(adam))
    assert not same_memories(before, after)
    adam.state[parameter]["count"] = 2
    assert not same_memories(after, list(remembered(adam)))
    adam.state[parameter]["count"] = [1]  # what is in a list is not looked at
    after = list(remembered(adam))
    assert not same_memories(after, after)


def test_another_optimizer_takes_what_is_remembered() -> None:
    one, other = stepped(torch.optim.Adam), stepped(torch.optim.Adam)
    one.state["global"] = {"count": 3}  # type: ignore[index]  # some keep more than torch's annotation says
    parameter = other.param_groups[0]["params"][0]
    kept = other.state[parameter]["exp_avg"]
    del other.state[other.param_groups[0]["params"][1]]
    other.state[parameter]["gone"] = 1
    shown = {id(tensor): tensor for tensor in tensors_of(one)}

    def bind(tensor: torch.Tensor, where: TensorPlace) -> None:
        tensor.data = shown[where.number]

    take_state(other, StateImage.of(one, place), bind)
    assert other.state[parameter]["exp_avg"] is kept
    assert [(number, key) for number, key, _ in remembered(other)] == [entry[:2] for entry in remembered(one)]
    assert [tensor.data_ptr() for tensor in tensors_of(other)] == [tensor.data_ptr() for tensor in tensors_of(one)]
    assert other.state["global"] == {"count": 3}  # type: ignore[index]  # as above
