"""Parts of mirrored objects are found without a question to replicas."""

from __future__ import annotations

import torch
from torch import nn

from raydist.mirroring.parts import has_load_hooks, held_parameters, modules_of
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
    assert mirror.link.calls == []


def test_hooks_of_optimizers_count() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    optimizer.register_load_state_dict_pre_hook(noted)
    assert has_load_hooks(optimizer)
