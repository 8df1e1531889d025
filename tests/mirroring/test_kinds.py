"""Which objects have a handle, and what of them is control state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from raydist.mirroring.kinds import (
    capture_object,
    content_digest,
    is_just_seeded,
    is_metric,
    kind_of,
    patch_object,
)
from raydist.mirroring.on_replica.replica_hooks import note_steps
from raydist.pickling.attribute_table import attribute_name, changed, seal

DIGEST = content_digest(lambda obj: 1 if type(obj) is nn.Parameter and obj.dim() == 1 else None)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.5)


@pytest.mark.parametrize(
    ("obj", "name"),
    [
        (nn.Linear(1, 1), "module"),
        (torchmetrics.SumMetric(), "module"),
        (optimizer(), "optimizer"),
        (torch.optim.lr_scheduler.ConstantLR(optimizer()), "scheduler"),
        (torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer()), "scheduler"),
        (torch.amp.GradScaler("cpu"), "gradient scaler"),
        (torch.Generator(), "generator"),
    ],
)
def test_kinds(obj: Any, name: str) -> None:
    kind = kind_of(obj)
    assert kind is not None
    assert kind.name == name


@pytest.mark.parametrize("obj", [torch.zeros(1), nn.Parameter(torch.zeros(1)), nn.Linear, {}, 1])
def test_everything_else_has_none(obj: Any) -> None:
    assert kind_of(obj) is None


def names_of_changes(obj: Any, change: Any) -> list[str]:
    before = seal(capture_object(obj, DIGEST))
    change(obj)
    return [attribute_name(path) for path in changed(before, capture_object(obj, DIGEST))]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda layer: layer.eval(), ["training"]),
        (lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros(1, 1))), ["_parameters['weight']"]),
        (lambda layer: layer.mask.add_(1), ["mask"]),
        (lambda layer: layer.config.update(a=2), ["config['a']"]),
        (lambda layer: layer.stack.add(3), ["stack"]),
        (lambda layer: layer.weight.data.add_(1), []),
        (lambda layer: layer(torch.ones(1)), []),
    ],
)
def test_changes_of_a_module(change: Any, expected: list[str]) -> None:
    layer: Any = nn.Linear(1, 1)
    layer.mask, layer.config, layer.stack = torch.zeros(1), {"a": 1}, {1, 2}
    assert names_of_changes(layer, change) == expected


def test_optimizer_state_is_no_control_state() -> None:
    def step(sgd: torch.optim.Optimizer) -> None:
        sgd.param_groups[0]["params"][0].grad = torch.ones(1)
        sgd.step()

    assert names_of_changes(optimizer(), step) == []


def test_what_a_replica_puts_into_an_optimizer_is_no_control_state() -> None:
    assert names_of_changes(optimizer(), lambda it: note_steps(it, lambda: None)) == []


def test_metric_states_are_no_control_state() -> None:
    metric = torchmetrics.SumMetric()
    assert is_metric(metric)
    assert not is_metric(nn.Linear(1, 1))
    assert set(names_of_changes(metric, lambda m: m.update(1.0))) == set()  # how often counts as a state


def test_generator_state() -> None:
    source, target = torch.Generator().manual_seed(3), torch.Generator()
    torch.rand(5, generator=source)
    patch_object(target, changed(capture_object(target, DIGEST), capture_object(source, DIGEST)))
    assert torch.rand(1, generator=target).item() == torch.rand(1, generator=source).item()


def test_numbers_that_torch_writes_without_counting() -> None:
    def update(scaler: Any) -> None:
        torch._amp_update_scale_(scaler._scale, scaler._growth_tracker, torch.zeros(()), 2.0, 0.5, 100)

    scaler: Any = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    assert names_of_changes(scaler, lambda _: None) == []
    assert "_growth_tracker" in names_of_changes(scaler, update)
    scaler._scale.fill_(torch.nan)
    assert names_of_changes(scaler, lambda _: None) == []


def test_just_seeded() -> None:
    generator = torch.Generator().manual_seed(3)
    assert is_just_seeded(generator)
    torch.rand(1, generator=generator)
    assert not is_just_seeded(generator)
