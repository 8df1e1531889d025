from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raydist as rd
from raydist.strategies.sync_batch_norm import SyncBatchNorm

ROWS = np.random.default_rng(0).normal(3.0, 2.0, size=(7, 2, 3))


def build(layer: type[nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 4, 1), layer(4), nn.Flatten(), nn.Linear(12, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


@pytest.mark.ray
@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_replicas_train_like_one_with_batch_norm(
    num_replicas: int, mirrored: Callable[[int], rd.MirroredStrategy]
) -> None:
    strategy = mirrored(num_replicas)
    with strategy.scope():
        model, optimizer = build(SyncBatchNorm)
    step = make_step(model, optimizer)
    for batch in strategy.distribute_dataset(rd.Dataset.from_tensor_slices(ROWS).batch(4)):
        strategy.run(step, args=(batch,))
    reference, alone = build(nn.BatchNorm1d)
    for start in (0, 4):
        make_step(reference, alone)(torch.from_numpy(ROWS[start : start + 4]))
    found = model.state_dict()
    for name, expected in reference.state_dict().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-12, msg=name)


def test_alone_it_is_torchs_layer() -> None:
    x = torch.from_numpy(ROWS)
    mine, theirs = SyncBatchNorm(2).double(), nn.BatchNorm1d(2).double()
    assert torch.equal(mine(x), theirs(x))
    assert torch.equal(mine.eval()(x), theirs.eval()(x))


def test_convert_keeps_parameters_and_everything_else() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2, momentum=None), nn.Sequential(nn.BatchNorm1d(3)))
    names = dict(model.named_parameters())
    converted: Any = SyncBatchNorm.convert(model.eval())
    assert isinstance(converted[1], SyncBatchNorm)
    assert isinstance(converted[2][0], SyncBatchNorm)
    assert converted[1].momentum is None
    assert not converted[1].training
    assert {name: id(value) for name, value in converted.named_parameters()} == {k: id(v) for k, v in names.items()}


def test_rows_need_features() -> None:
    with pytest.raises(ValueError, match=r"needs \(rows, features"):
        SyncBatchNorm(2)(torch.ones(3))
