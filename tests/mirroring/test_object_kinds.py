"""Kinds and parts of mirrored objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from raydist.mirroring.object_kinds import (
    capture_object,
    content_digest,
    has_load_hooks,
    has_plain_state,
    held_parameters,
    is_just_seeded,
    is_metric,
    kind_of,
    modules_of,
    patch_object,
)
from raydist.mirroring.replica_hooks import note_steps
from raydist.pickling.attribute_table import attribute_name, changed, seal
from tests.mirroring.in_process import Mirror

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


def noted(*args: object) -> None:
    """A hook of the program's."""


def test_nobody_is_asked(mirror: Mirror) -> None:
    with mirror.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mirror.run(lambda: (model, optimizer))
    mirror.link.calls.clear()
    assert len(list(modules_of(model))) == 3
    assert len(list(held_parameters(model))) == len(list(held_parameters(optimizer))) == 4
    assert not has_load_hooks(model)
    assert not has_load_hooks(optimizer)
    assert has_plain_state(model)
    assert has_plain_state(optimizer)
    assert mirror.link.calls == []


def test_hooks_of_optimizers_count() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    optimizer.register_load_state_dict_pre_hook(noted)
    assert has_load_hooks(optimizer)


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


@pytest.mark.parametrize("make", [lambda: Renamed(1, 1), lambda: nn.Sequential(More(1, 1)), hooked, patched])
def test_states_of_the_programs_own_making_are_not_plain(make: Callable[[], nn.Module]) -> None:
    assert not has_plain_state(make())
    assert not has_plain_state(Counting(nn.Linear(1, 1).parameters()))
