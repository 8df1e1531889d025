from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.mirroring.objects import MirroredClasses
from raydist.training.architecture import architecture_of, build_module

MODULES: list[nn.Module] = [
    nn.Linear(2, 3),
    nn.Linear(2, 3, bias=False).double(),
    nn.Linear(2, 3).to(torch.bfloat16),
    nn.Conv2d(4, 2, (3, 1), padding=1, groups=2, bias=False),
    nn.Conv1d(3, 3, 3, padding="same", padding_mode="circular"),
    nn.ConvTranspose2d(2, 3, 2, output_padding=0),
    nn.BatchNorm2d(4, eps=1e-3, affine=False),
    nn.LayerNorm((3, 4), bias=False),
    nn.Embedding(10, 4, padding_idx=1),
    nn.GRU(3, 4, 2, batch_first=True, dropout=0.25),
    nn.LSTM(3, 4, bidirectional=True, proj_size=2),
    nn.RNN(3, 4, nonlinearity="relu"),
    nn.MultiheadAttention(8, 4),
    nn.Dropout(0.3),
    nn.ReLU(inplace=True),
    nn.Softmax(dim=1),
    nn.Unflatten(1, (2, 2)),
    nn.Sequential(),
    nn.ModuleDict({"a": nn.ModuleList([nn.Linear(1, 2), nn.Tanh()])}),
    nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sequential(nn.ReLU(), nn.Flatten()), nn.Linear(8, 1)),
]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: type(module).__name__)
def test_modules_of_torch(module: nn.Module) -> None:
    description = json.loads(json.dumps(architecture_of(module)))
    built = build_module(description, module.state_dict())
    assert repr(built) == repr(module)
    assert [value.dtype for value in built.parameters()] == [value.dtype for value in module.parameters()]
    assert all(value.device.type == "cpu" for value in built.state_dict().values())


class Nobody:
    """Owns mirrored objects and lets everybody read and write them."""

    def before_read(self, obj: Any, name: str) -> None: ...

    def before_write(self, obj: Any, name: str) -> None: ...


def test_mirrored_modules_are_described_as_what_they_were() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    plain = architecture_of(module)
    classes = MirroredClasses(Nobody())
    for part in module.modules():
        classes.mirror(part)
    assert type(module) is not nn.Sequential
    assert architecture_of(module) == plain is not None


class Mine(nn.Linear):
    pass


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    return module


def twice() -> nn.Module:
    linear = nn.Linear(2, 2)
    return nn.Sequential(linear, linear)


def with_a_hole() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    module.register_module("none", None)
    return module


def with_hook() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *args: None)
    return module


def with_own_forward() -> nn.Module:
    module = nn.Linear(2, 2)
    module.__dict__["forward"] = lambda x: x
    return module


@pytest.mark.parametrize(
    "make",
    [
        with_hook,
        lambda: nn.Sequential(with_hook()),
        with_own_forward,
        lambda: Mine(2, 3),
        lambda: nn.Sequential(nn.Linear(2, 2), Mine(2, 2)),
        lambda: nn.TransformerEncoderLayer(8, 2),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        lambda: nn.LazyLinear(3),
        tied,
        twice,
        with_a_hole,
    ],
)
def test_what_cannot_be_said(make: Any) -> None:
    assert architecture_of(make()) is None


LINEAR = {"class": "Linear", "arguments": {"in_features": 2, "out_features": 3, "bias": True}, "dtype": "float32"}


@pytest.mark.parametrize(
    "forged",
    [
        None,
        [],
        {},
        {"class": "Module", "arguments": {}},
        {"class": "__import__", "arguments": {}},
        {"class": ["Linear"], "arguments": {}},
        {"class": "os.system", "arguments": {"command": "true"}},
        LINEAR | {"arguments": {"in_features": 1 << 40, "out_features": 1 << 40}},
        LINEAR | {"arguments": {"in_features": -1, "out_features": 3}},
        LINEAR | {"arguments": {"in_features": "2", "out_features": 3}},
        LINEAR | {"arguments": {"in_features": 2, "out_features": 3, "device": "cuda"}},
        LINEAR | {"arguments": {"in_features": {"a": 1}, "out_features": 3}},
        LINEAR | {"arguments": 3},
        LINEAR | {"dtype": "load"},
        LINEAR | {"dtype": "int64"},
        LINEAR | {"dtype": "float64"},
        {"class": "LSTM", "arguments": {"input_size": 1, "hidden_size": 1, "num_layers": 1 << 40}},
        {"class": "Sequential", "children": [["a.b", LINEAR]]},
        {"class": "Sequential", "children": 3},
    ],
)
def test_forged_descriptions(forged: Any) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"module=\.\.\."):
        build_module(forged, nn.Linear(2, 3).state_dict())


def test_what_a_buffer_is_on_several_replicas_is_no_part_of_it() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    assert architecture_of(module) is not None
    rd.set_aggregation(module, "0.running_mean", aggregation="first")
    assert architecture_of(module) is None  # `Model.load` asks for the module, and so for the choice


def test_a_deep_description() -> None:
    forged: Any = LINEAR
    for _ in range(5000):
        forged = {"class": "Sequential", "children": [["0", forged]]}
    with pytest.raises(rd.InvalidArgumentError, match="nested more than 50 deep"):
        build_module(forged, {})
