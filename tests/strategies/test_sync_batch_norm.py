from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raydist as rd
from raydist.strategies.sync_batch_norm import SyncBatchNorm

pytestmark = pytest.mark.timeout(120)
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


def check_trains_as_batch_norm(
    strategy: rd.Strategy, model: nn.Module, optimizer: torch.optim.Optimizer, layer: type[nn.Module]
) -> None:
    """Train it on a strategy, and the same with a layer of one device alone."""
    step = make_step(model, optimizer)
    for batch in strategy.distribute_dataset(rd.Dataset.from_tensor_slices(ROWS).batch(4)):
        strategy.run(step, args=(batch,))
    reference, alone = build(layer)
    for start in (0, 4):
        make_step(reference, alone)(torch.from_numpy(ROWS[start : start + 4]))
    found = model.state_dict()
    assert list(found) == list(reference.state_dict())
    for name, expected in reference.state_dict().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.ray
def test_replicas_train_like_one_with_batch_norm(mirrored: Callable[[int], rd.MirroredStrategy]) -> None:
    for num_replicas in (2, 3):
        strategy = mirrored(num_replicas)
        with strategy.scope():
            model, optimizer = build(SyncBatchNorm)
        check_trains_as_batch_norm(strategy, model, optimizer, nn.BatchNorm1d)


def test_convert_keeps_parameters_and_everything_else() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2, momentum=None), nn.Sequential(nn.BatchNorm1d(3)))
    names = dict(model.named_parameters())
    converted: Any = SyncBatchNorm.convert(model.eval())
    assert isinstance(converted[1], SyncBatchNorm)
    assert isinstance(converted[2][0], SyncBatchNorm)
    assert converted[1].momentum is None
    assert not converted[1].training
    assert {name: id(value) for name, value in converted.named_parameters()} == {k: id(v) for k, v in names.items()}


class NormReLU(nn.BatchNorm1d):
    """As `timm.layers.BatchNormAct2d`: it does more than normalise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        running_var: Any = self.running_var
        result: torch.Tensor = super().forward(x).relu() + 0.1 * running_var.mean()
        return result


class OwnStatistics(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            running_mean: Any = self.running_mean
            running_mean.lerp_(x.mean(0), 0.1)
        return x - x.mean(0)


def test_a_subclass_keeps_its_class_its_forward_and_its_hooks() -> None:
    layer = NormReLU(2).double()
    seen: list[torch.Size] = []
    layer.register_forward_hook(lambda *told: seen.append(told[2].shape))
    before, expected = list(layer.state_dict()), NormReLU(2).double()(torch.from_numpy(ROWS))
    assert SyncBatchNorm.convert(SyncBatchNorm.convert(layer)) is layer
    assert type(layer) is NormReLU
    assert torch.equal(layer(torch.from_numpy(ROWS)), expected)
    assert (seen, list(layer.state_dict())) == ([expected.shape], before)
    with pytest.raises(ValueError, match="expected 2D or 3D"):
        layer(torch.ones(3))
    assert torch.equal(torch.nn.functional.batch_norm(torch.ones(2, 2), None, None, training=True), torch.zeros(2, 2))
    assert torch.overrides._get_current_function_mode_stack() == [], "other layers would use the global batch"


def test_what_torch_made_of_layers_keeps_hooks_parametrizations_and_flags() -> None:
    layer = nn.BatchNorm1d(2, track_running_stats=False, dtype=torch.float64)
    layer.weight.requires_grad_(False)
    layer.register_forward_pre_hook(lambda *told: None)
    converted = SyncBatchNorm.convert(nn.Sequential(nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3)), layer))
    assert [type(each) for each in converted.children()] == [SyncBatchNorm, SyncBatchNorm]
    assert (layer.weight.requires_grad, layer.weight.dtype, layer.running_mean) == (False, torch.float64, None)
    assert len(layer._forward_pre_hooks) == 1
    with pytest.raises(ValueError, match="LazyBatchNorm1d before its first call"):
        SyncBatchNorm.convert(nn.LazyBatchNorm1d())


@pytest.mark.ray
def test_other_layers_train_like_one_replica_and_what_cannot_is_named(two: rd.MirroredStrategy) -> None:
    made = nn.SyncBatchNorm(4).double()
    for way in ("subclass", "torch", "torch's, copied"):
        layer = NormReLU if way == "subclass" else nn.BatchNorm1d
        with two.scope():
            model, _ = build(layer)
            if way == "subclass":
                SyncBatchNorm.convert(model)
            else:
                model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
            if way == "torch's, copied":
                setattr(model, "1", copy.deepcopy(made))  # a name that is no identifier
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        check_trains_as_batch_norm(two, model, optimizer, layer)
    with two.scope():
        own = SyncBatchNorm.convert(OwnStatistics(2).double())
    with pytest.raises(ValueError, match="that of OwnStatistics takes statistics of its own"):
        two.local_results(two.run(own, args=(torch.ones(4, 2, dtype=torch.float64),)))


@pytest.mark.ray
def test_a_single_row_is_an_error_as_on_one_replica(two: rd.MirroredStrategy) -> None:
    with two.scope():
        layer = SyncBatchNorm(2)
    batches = rd.Dataset.from_tensor_slices(np.ones((5, 2), np.float32)).batch(2)  # a row each, then one in all
    good, also_good, single = two.distribute_dataset(batches)
    for batch in (good, also_good):
        two.local_results(two.run(layer, args=(batch,)))
    with pytest.raises(ValueError, match="expected more than 1 value per channel when training.*got 1 in this"):
        two.local_results(two.run(layer, args=(single,)))
    with pytest.raises(ValueError, match="more than 1 value per channel when training"):
        SyncBatchNorm(2)(torch.ones(1, 2))


@pytest.mark.ray
def test_numbers_of_16_bits_are_added_up_in_more(two: rd.MirroredStrategy) -> None:
    """More rows than the largest float16, and more of them than bfloat16 counts one by one."""
    generator = torch.Generator().manual_seed(0)
    close = functools.partial(torch.testing.assert_close, rtol=1e-2, atol=1e-4)
    for dtype in (torch.float16, torch.bfloat16):
        rows, upstream = (torch.randn(4, 1, 150, 151, generator=generator).add(10).to(dtype) for _ in range(2))
        with two.scope():
            layer = SyncBatchNorm(1)

        def step(batch: Any, layer: nn.Module = layer) -> tuple[torch.Tensor, Any]:
            leaf = batch[0].requires_grad_()
            out = layer(leaf)
            out.backward(batch[1])
            return out.detach(), leaf.grad

        (batch,) = two.distribute_dataset(rd.Dataset.from_tensor_slices((rows, upstream)).batch(4))
        found = two.gather(two.run(step, args=(batch,)))
        alone = nn.BatchNorm2d(1)
        close(found, step((rows, upstream), alone))
        for name in ("running_mean", "running_var"):
            torch.testing.assert_close(layer.state_dict()[name], alone.state_dict()[name], rtol=1e-5, atol=0)
