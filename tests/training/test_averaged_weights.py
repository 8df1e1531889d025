"""Averaged weights (EMA, SWA) on several replicas are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import raydist as rd
from tests.training.toys import batches_of, regression, regression_arrays, small_net

ROWS, BATCH = 22, 4
KINDS: dict[str, Callable[[], Any]] = {"ema": lambda: get_ema_multi_avg_fn(0.9), "swa": lambda: None}


def averaged(net: nn.Module, kind: str) -> AveragedModel:
    return AveragedModel(net, multi_avg_fn=KINDS[kind]())


def bare(kind: str, every: int) -> tuple[nn.Module, AveragedModel]:
    net = small_net()
    average, optimizer = averaged(net, kind), torch.optim.SGD(net.parameters(), lr=0.1)
    for number, (x, y) in enumerate(batches_of(regression_arrays(ROWS), BATCH)):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        if (number + 1) % every == 0:
            average.update_parameters(net)
    return net, average


def assert_same(mine: nn.Module, theirs: nn.Module) -> None:
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(mine.state_dict()[name], value, rtol=1e-9, atol=1e-15, msg=name)


@pytest.mark.ray
def test_a_loop_averages_in_the_step_or_on_the_driver(two: rd.MirroredStrategy) -> None:
    for kind, in_step in (("ema", True), ("swa", False)):
        with two.scope():
            net = small_net()
            average, optimizer = averaged(net, kind), torch.optim.SGD(net.parameters(), lr=0.1)

        def step(
            batch: Any, net: Any = net, optimizer: Any = optimizer, average: Any = average, in_step: bool = in_step
        ) -> None:
            x, y = batch
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            if in_step:
                average.update_parameters(net)

        for batch in two.distribute_dataset(regression(ROWS, BATCH)):
            two.run(step, args=(batch,))
            if not in_step:
                average.update_parameters(net)
        expected, expected_average = bare(kind, 1)
        assert_same(net, expected)
        assert_same(average, expected_average)
