from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raydist.mirroring.object_kinds import digest_of, trained_state


def test_names_are_those_of_the_outermost_module() -> None:
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
def test_every_bit_counts(values: list[float], place: int, bit: int) -> None:
    tensor = torch.tensor(values)
    changed = tensor.clone()
    changed.view(torch.int32)[place % len(values)] ^= 1 << bit if bit < 31 else -(2**31)
    assert digest_of(tensor) == digest_of(tensor.clone())
    assert digest_of(tensor) != digest_of(changed)


def test_form_counts() -> None:
    values = torch.zeros(4)
    others = [values.view(2, 2), values.double()[:2], torch.zeros(4, dtype=torch.int32), torch.zeros(0), 0.0, 0]
    digests = [digest_of(value) for value in (values, *others)]
    assert len(set(digests)) == len(digests)
    strided = torch.arange(6.0).view(2, 3).t()
    assert digest_of(strided) == digest_of(strided.contiguous())
    assert digest_of(torch.tensor([0.0, 2.0]).to_sparse()) == digest_of(torch.tensor([0.0, 2.0]))
    assert digest_of(torch.ones(3, dtype=torch.bfloat16)) != digest_of(torch.zeros(3, dtype=torch.bfloat16))
