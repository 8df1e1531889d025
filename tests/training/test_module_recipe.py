from __future__ import annotations

import copy
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.training.module_recipe import build_module, recipe_of

LAYERS = [
    nn.Linear(3, 2, bias=False, dtype=torch.float64),
    nn.Conv2d(3, 4, 3, padding="same", groups=1),
    nn.ConvTranspose1d(3, 4, 2, output_padding=0),
    nn.BatchNorm2d(3, momentum=0.5),
    nn.LayerNorm([3, 4], eps=1e-3),
    nn.GroupNorm(2, 4),
    nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True, proj_size=2),
    nn.GRU(3, 4, bias=False),
    nn.RNN(3, 4, nonlinearity="relu"),
    nn.Embedding(5, 4, padding_idx=0),
    nn.MaxPool2d(2, stride=(1, 2)),
    nn.AdaptiveAvgPool2d((None, 2)),
    nn.Dropout(0.3),
    nn.Unflatten(1, (2, 3)),
    nn.GELU("tanh"),
    nn.Hardtanh(-2.0, 2.0),
    nn.Softmax(dim=1),
    nn.PReLU(),
    nn.Upsample(scale_factor=2),
    nn.Identity(),
    nn.Tanh(),
    nn.Sequential(OrderedDict(first=nn.Linear(2, 3), inner=nn.Sequential(nn.ReLU(), nn.Linear(3, 1)))),
    nn.ModuleDict({"a": nn.ModuleList([nn.Linear(1, 1)])}),
]


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.state_dict())


@pytest.mark.parametrize("module", LAYERS, ids=lambda module: type(module).__name__)
def test_layers_and_containers_of_torch_are_built_as_they_were(module: nn.Module) -> None:
    recipe = json.loads(json.dumps(recipe_of(module)))
    built = build_module(recipe, tensors_of(module))
    assert str(built) == str(module)
    assert {k: (v.shape, v.dtype) for k, v in tensors_of(built).items()} == {
        k: (v.shape, v.dtype) for k, v in tensors_of(module).items()
    }
    assert not any(value.is_meta for value in tensors_of(built).values())


def test_what_was_changed_after_making_is_told() -> None:
    dropout = nn.Dropout(0.5)
    net = nn.Sequential(dropout)
    dropout.p = 0.1
    built: Any = build_module(recipe_of(net), {})
    assert built[0].p == 0.1


def with_hook() -> nn.Module:
    net = nn.Linear(1, 1)
    net.register_forward_hook(lambda *args: None)
    return net


def with_own_forward() -> nn.Module:
    net = nn.Linear(1, 1)
    net.__dict__["forward"] = lambda x: x
    return net


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    return net


class Own(nn.Linear):
    """Named so by its author."""


class Linear(nn.Linear):
    """Named like one of torch's."""


SHARED = nn.Linear(2, 2)


@pytest.mark.parametrize(
    "module",
    [
        with_hook(),
        with_own_forward(),
        tied(),
        nn.Sequential(SHARED, SHARED),
        nn.Sequential(Own(1, 1)),
        Linear(1, 1),
        nn.MultiheadAttention(4, 2),
        nn.TransformerEncoderLayer(4, 2, 8),
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_a_recipe_cannot_say_has_none(module: nn.Module) -> None:
    assert recipe_of(module) is None


def changed(**changes: Any) -> dict[str, Any]:
    recipe = copy.deepcopy(recipe_of(nn.Linear(3, 2)))
    assert recipe is not None
    recipe["args"].update(changes.pop("args", {}))
    return {**recipe, **changes}


def nested(depth: int) -> dict[str, Any]:
    recipe: dict[str, Any] = {"class": "Linear", "args": {"in_features": 3, "out_features": 2}}
    for _ in range(depth):
        recipe = {"class": "Sequential", "parts": [["0", recipe]]}
    return recipe


@pytest.mark.parametrize(
    "recipe",
    [
        changed(args={"out_features": 10**12}),  # nothing of that size is ever made
        changed(args={"out_features": -1}),
        changed(args={"dtype": "float64"}),
        changed(args={"bias": False}),
        changed(args={"device": "cuda"}),
        changed(args={"_weight": 3}),
        changed(**{"class": "Module"}),
        changed(**{"class": "Transformer"}),
        changed(**{"class": "os.system"}),
        changed(**{"class": "functional"}),
        changed(**{"class": ["Linear"]}),
        {"class": "Linear", "args": [1, 2]},
        {"class": "Linear"},
        {"class": "Sequential", "parts": [["a.b", changed()]]},
        {"class": "Sequential", "parts": [[3, changed()]]},
        {"class": "Sequential", "parts": 3},
        {"class": "LSTM", "args": {"input_size": 1, "hidden_size": 1, "num_layers": 10**9}},
        {"class": "LSTM", "args": {}},
        nested(60),
        "Linear",
        None,
    ],
    ids=str,
)
def test_hostile_recipes_are_refused(recipe: Any) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="made of torch.nn's.*module="):
        build_module(recipe, tensors_of(nn.Linear(3, 2)))


def test_a_plain_sequential_is_loaded_without_a_module(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3)).double()
    x = torch.rand(4, 1, 5, 5, dtype=torch.float64)
    net(x)
    rd.Model(net).save(tmp_path / "model")
    loaded = rd.Model.load(tmp_path / "model").module
    assert torch.equal(loaded.eval()(x), net.eval()(x))
    loaded.train()
    assert not torch.equal(loaded(x), net(x))
