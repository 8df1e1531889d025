"""Parts of mirrored objects are found without a question to replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from raydist.mirroring.parts import has_load_hooks, has_plain_state, held_parameters, modules_of
from tests.mirroring.in_process import Mirror


def noted(*args: object) -> None:
    """A hook of the program's."""


def test_nobody_is_asked() -> None:
    mirror = Mirror()
    with mirror.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mirror.run(lambda: (model, optimizer))
    mirror.link.calls.clear()
    assert len(list(modules_of(model))) == 3
    assert len(list(held_parameters(model))) == len(list(held_parameters(optimizer))) == 4
    assert not has_load_hooks(model)
    assert not has_load_hooks(optimizer)
    assert has_plain_state(model)
    assert has_plain_state(optimizer)
    assert mirror.link.calls == []


def test_hooks_of_optimizers_count() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    optimizer.register_load_state_dict_pre_hook(noted)
    assert has_load_hooks(optimizer)


class Counting(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": 3}


class Renamed(nn.Linear):
    def _save_to_state_dict(self, *args: Any) -> None: ...


class More(nn.Linear):
    def get_extra_state(self) -> int:
        return 3


def hooked() -> nn.Module:
    layer = nn.Linear(1, 1)
    layer.register_state_dict_post_hook(noted)
    return nn.Sequential(layer)


def patched() -> nn.Module:
    layer: Any = nn.Linear(1, 1)
    layer.load_state_dict = noted
    return nn.Sequential(layer)


@pytest.mark.parametrize("make", [lambda: Renamed(1, 1), lambda: nn.Sequential(More(1, 1)), hooked, patched])
def test_states_of_the_programs_own_making_are_not_plain(make: Callable[[], nn.Module]) -> None:
    assert not has_plain_state(make())
    assert not has_plain_state(Counting(nn.Linear(1, 1).parameters()))
