"""`compile(precision="fp16")` is a bare loop with a GradScaler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from tests.shared_strategies import few_workers

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

ROWS, BATCH = 24, 4


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def arrays() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(ROWS, 3), torch.randn(ROWS, 1)
    y[5] = 1e5  # its gradient is not finite in float16 once it is scaled: on one replica only
    return x, y


def data() -> rd.Dataset:
    return rd.Dataset.from_tensor_slices(arrays()).batch(BATCH)


def bare(clip_norm: float | None, accumulate_steps: int, epochs: int) -> tuple[nn.Module, dict[str, Any]]:
    module, size = net(), BATCH * accumulate_steps
    optimizer, scaler = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9), torch.amp.GradScaler("cpu")
    x, y = arrays()
    for start in [*range(0, ROWS, size)] * epochs:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            prediction = module(x[start : start + size])
        scaler.scale(nn.functional.mse_loss(prediction.float(), y[start : start + size])).backward()
        if clip_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
        scaler.step(optimizer)
        scaler.update()
    return module, scaler.state_dict()


def built(strategy: rd.Strategy, **settings: Any) -> rd.Model:
    with strategy.scope():
        model = rd.Model(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        model.compile(optimizer, nn.MSELoss(), precision="fp16", **settings)
    return model


@pytest.fixture(params=[1, 2, 3])
def strategy(request: pytest.FixtureRequest, mirrored: Callable[[int], rd.Strategy]) -> rd.Strategy:
    return rd.OneDeviceStrategy("cpu") if request.param == 1 else mirrored(request.param)


@pytest.mark.parametrize("steps_per_execution", [1, 2])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_steps_and_scales_are_those_of_a_bare_loop(
    strategy: rd.Strategy, clip_norm: float | None, accumulate_steps: int, steps_per_execution: int
) -> None:
    model = built(
        strategy,
        clip_norm=clip_norm,
        accumulate_steps=accumulate_steps,
        steps_per_execution=steps_per_execution,
    )
    model.fit(data(), epochs=3, verbose=False)
    expected, state = bare(clip_norm, accumulate_steps, 3)
    scaler = model.checkpoint_objects()["scaler"]
    assert scaler.state_dict() == state
    assert state["scale"] < 2.0**16  # steps were left out, and others taken
    assert state["_growth_tracker"] > 0
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_a_resumed_fit_goes_on_with_the_scale(mirrored: Callable[[int], rd.Strategy], tmp_path: Path) -> None:
    whole = built(mirrored(2), accumulate_steps=2)
    whole.fit(data(), epochs=3, verbose=False)
    built(mirrored(2), accumulate_steps=2).fit(data(), epochs=2, checkpoint=tmp_path, verbose=False)
    resumed = built(mirrored(2), accumulate_steps=2)
    resumed.fit(data(), epochs=3, checkpoint=tmp_path, verbose=False)
    states = [model.checkpoint_objects()["scaler"].state_dict() for model in (whole, resumed)]
    assert states[0] == states[1]
    assert states[0]["scale"] < 2.0**16
    for mine, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)


def test_workers_apart_are_refused() -> None:
    with few_workers(2) as strategy:  # nothing is started
        with strategy.scope():
            model = rd.Model(nn.Flatten())
        with pytest.raises(rd.InvalidArgumentError, match='precision must be "bf16" or None where several workers'):
            model.compile("sgd", "mse", precision="fp16")
