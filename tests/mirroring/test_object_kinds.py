"""Kinds of mirrored objects, and the trained state that replicas compare."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raydist.mirroring.object_kinds import (
    digest_of,
    has_load_hooks,
    has_plain_state,
    trained_state,
)


def noted(*args: object) -> None:
    """A hook of the program's."""


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


def test_states_built_by_the_program_are_not_plain() -> None:
    for make in (lambda: Renamed(1, 1), lambda: nn.Sequential(More(1, 1)), hooked, patched):
        assert not has_plain_state(make())
    optimizer = Counting(nn.Linear(1, 1).parameters())
    assert not has_plain_state(optimizer)
    optimizer.register_load_state_dict_pre_hook(noted)
    assert has_load_hooks(optimizer)


def test_names_start_at_the_outermost_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    adam = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 2)).sum().backward()
    adam.step()
    objects = [model[0], model, *model.parameters(), adam]
    names = [name for name, _ in trained_state(objects)]
    assert names[:3] == ["Sequential.0.weight", "Sequential.1.weight", "Sequential.1.bias"]
    assert "Adam.state[Sequential.1.bias].exp_avg" in names
    assert "Adam.param_groups[0].weight_decay" in names
    assert not [name for name in names if "running" in name]


@given(st.lists(st.floats(width=32), min_size=1, max_size=20), st.integers(0, 19), st.integers(0, 31))
def test_digests_depend_on_every_bit_and_on_shape_and_dtype(values: list[float], place: int, bit: int) -> None:
    tensor = torch.tensor(values)
    changed = tensor.clone()
    changed.view(torch.int32)[place % len(values)] ^= 1 << bit if bit < 31 else -(2**31)
    assert digest_of(tensor) == digest_of(tensor.clone())
    assert digest_of(tensor) != digest_of(changed)
    zeros = torch.zeros(4)
    others = [zeros.view(2, 2), zeros.double()[:2], torch.zeros(4, dtype=torch.int32), torch.zeros(0), 0.0, 0]
    assert len({digest_of(value) for value in (zeros, *others, zeros.bfloat16() + 1, zeros.bfloat16())}) == 9
    strided = torch.arange(6.0).view(2, 3).t()
    assert digest_of(strided) == digest_of(strided.contiguous())
    assert digest_of(torch.tensor([0.0, 2.0]).to_sparse()) == digest_of(torch.tensor([0.0, 2.0]))
