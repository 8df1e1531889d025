"""Compiled functions and modules: the replicas compile for themselves."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from raydist.pickling.compiled import original_of, reduce_compiled
from tests.mirroring.in_process import Mirror, linear

ONES = torch.ones(2)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_arguments_are_found_again() -> None:
    compiled = torch.compile(double, backend="eager", dynamic=True, fullgraph=True)
    reduced = reduce_compiled(compiled)
    assert reduced is not None
    original, arguments = reduced[1]
    assert original is double
    assert (arguments["dynamic"], arguments["fullgraph"]) == (True, True)
    again = reduced[0](original, arguments)
    assert again(ONES).tolist() == [2.0, 2.0]
    assert reduce_compiled(again)[1] == reduced[1]  # type: ignore[index]


def test_inductor_options_are_found_again() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when inductor is imported
        reduced = reduce_compiled(torch.compile(double, mode="reduce-overhead"))
    assert reduced is not None
    assert reduced[1][1]["options"]["triton.cudagraphs"] is True
    assert "backend" not in reduced[1][1]


def test_what_is_not_compiled() -> None:
    compiled = torch.compile(double, backend="eager")
    around = functools.wraps(compiled)(lambda x: compiled(x))
    assert original_of(double) is None
    assert original_of(around) is None
    assert original_of(compiled) is double
    assert original_of(nn.Linear(1, 1)) is None
    assert original_of(3) is None


def test_compiled_step_trains_the_replicas_model() -> None:
    mirror = Mirror()
    layer = linear(mirror)
    with mirror.scope():
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)

    @torch.compile(backend="eager")
    def loss_of(x: torch.Tensor) -> Any:
        return layer(x).sum()

    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = loss_of(x)
        loss.backward()
        optimizer.step()
        return loss.item()

    assert mirror.run(step, ONES) == [3.0, 3.0]
    assert mirror.run(step, ONES) == [1.0, 1.0]
    assert layer.weight.tolist() == [[-1.0, 0.0]]


def test_compiled_module() -> None:
    mirror = Mirror()
    layer = linear(mirror)
    compiled: Any = torch.compile(layer, backend="eager")
    step = lambda x: (compiled(x).item(), compiled._orig_mod is layer, type(compiled).__name__)  # noqa: E731
    assert mirror.run(step, ONES) == [(3.0, True, "OptimizedModule")] * 2
    mirror.run(lambda: layer.weight.data.add_(1).sum())
    assert compiled(ONES).item() == 5.0
    assert compiled.state_dict()["_orig_mod.weight"].tolist() == [[2.0, 3.0]]
    compiled.eval()
    assert mirror.run(lambda: (layer.training, compiled.training)) == [(False, False)] * 2
    layer.weight.data.zero_()
    assert mirror.run(step, ONES)[1][0] == 0.0


def test_compiled_function_called_on_the_driver() -> None:
    mirror = Mirror()
    layer = linear(mirror)

    @torch.compile(backend="eager")
    def forward(x: torch.Tensor) -> Any:
        return layer(x)

    assert forward(ONES).item() == 3.0
    assert mirror.run(lambda x: forward(x).item(), ONES) == [3.0, 3.0]
    mirror.run(lambda: layer.weight.data.add_(1).sum())
    assert forward(ONES).item() == 5.0
    mirror.run(lambda: layer.weight.data.add_(1).sum())
    assert forward(ONES).item() == 7.0


@pytest.mark.parametrize("train", [True, False])
def test_compiled_step_is_the_whole_function(train: bool) -> None:
    mirror = Mirror()
    layer = linear(mirror)
    layer.train(train)

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> Any:
        return layer(x) + float(layer.training)

    assert [value.item() for value in mirror.run(step, ONES)] == [3.0 + train] * 2
    layer.train(not train)
    assert [value.item() for value in mirror.run(step, ONES)] == [4.0 - train] * 2
