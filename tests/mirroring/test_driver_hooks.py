"""Changes to the hooks on the driver's parameters since the last step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from raydist.mirroring.gradients import HOOKS_OF_DRIVER, DriverHooks
from raydist.mirroring.messages import Writes
from raydist.mirroring.tensor import TensorRecord


def record() -> tuple[nn.Parameter, TensorRecord]:
    parameter = nn.Parameter(torch.ones(1))
    owner: Any = None
    return parameter, TensorRecord(parameter, 3, owner)


def collected(hooks: DriverHooks) -> Writes:
    writes = Writes()
    hooks.collect(writes)
    return writes


def test_only_changes_are_sent_and_again_until_they_are_on_their_way() -> None:
    hooks, (parameter, known) = DriverHooks(), record()
    first = parameter.register_hook(torch.neg)
    hooks.add(known)
    assert not collected(hooks)
    second = parameter.register_hook(torch.abs)
    for _ in range(2):
        removed, added = collected(hooks).hooks[3]
        assert (removed, added.before) == ((), {(HOOKS_OF_DRIVER, second.id): torch.abs})
    hooks.mark_sent()
    assert not collected(hooks)
    first.remove()
    removed, added = collected(hooks).hooks[3]
    assert (removed, added.keys()) == (((HOOKS_OF_DRIVER, first.id),), frozenset())


def test_parameters_are_watched_from_their_first_hook_on() -> None:
    hooks, (parameter, known) = DriverHooks(), record()
    hooks.add(known)
    handle = parameter.register_post_accumulate_grad_hook(torch.neg)
    hooks.registered(known)
    hooks.registered(known)
    assert collected(hooks).hooks[3][1].keys() == {(HOOKS_OF_DRIVER, handle.id)}
    hooks.forget(3)
    hooks.mark_sent()
    assert not collected(hooks)
