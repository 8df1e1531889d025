from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from raydist.mirroring.watched_places import WatchedPlace, is_of_strategy, watch


def watched(obj: Any) -> WatchedPlace:
    place = watch(obj)
    assert place is not None
    return place


def test_what_must_be_a_strategys() -> None:
    kinds = [nn.ReLU, nn.Parameter, torch.optim.SGD, torch.optim.lr_scheduler.StepLR, torch.Tensor, dict, int]
    assert [is_of_strategy(kind) for kind in kinds] == [True] * 4 + [False] * 3


def test_a_variable_that_holds_another_module() -> None:
    model = nn.ReLU()

    def step() -> nn.Module:
        return model

    place = watched(step)
    assert place.is_same()
    model = nn.ReLU()
    assert not place.is_same()


def test_a_variable_without_a_value() -> None:
    def make() -> tuple[WatchedPlace, types.FunctionType]:
        model = nn.ReLU()

        def step() -> nn.Module:
            return model

        place = watched(step)
        assert step.__closure__ is not None
        del step.__closure__[0].cell_contents
        assert isinstance(step, types.FunctionType)
        return place, step

    place, step = make()
    assert not place.is_same()
    assert watch(step) is None


class Holder:
    model: nn.Module = nn.ReLU()
    other: int = 3

    def __init__(self) -> None:
        self.model = nn.ReLU()


def test_an_attribute_that_holds_another_module() -> None:
    holder = Holder()
    place = watched(holder)
    holder.other = 4
    assert place.is_same()
    holder.model = nn.ReLU()
    assert not place.is_same()


def test_children_parameters_and_groups() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    places = [watched(model), watched(model[0]), watched(optimizer)]
    assert all(place.is_same() for place in places)
    model.append(nn.ReLU())
    model[0].weight = nn.Parameter(torch.ones(1, 1))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert not any(place.is_same() for place in places)


def test_what_is_gone_is_not_the_same() -> None:
    models = [nn.ReLU()]
    place = watched(models[0])
    models.clear()
    assert not place.is_same()


def test_nothing_to_look_after() -> None:
    assert watch(3) is None
    assert watch({"model": nn.ReLU()}) is None
    assert watch(lambda: 3) is None
