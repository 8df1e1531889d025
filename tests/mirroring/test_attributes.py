"""Attributes, learning rates, schedules and states of optimizers follow in both directions."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from raydist.core.errors import FailedPreconditionError
from tests.mirroring.in_process import Mirror, linear


class Counter(nn.Linear):
    """A module with plain attributes of several kinds."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.count = 0
        self.history: list[int] = []
        self.limits = {"low": 0.0, "high": 1.0}
        self.mask = torch.zeros(2)

    def record(self) -> int:
        self.count += 1
        self.history.append(self.count)
        return self.count


def counter(mirror: Mirror) -> Counter:
    with mirror.scope():
        return Counter()


def schedule(mirror: Mirror) -> tuple[nn.Linear, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    layer = linear(mirror)
    with mirror.scope():
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return layer, optimizer, scheduler


def train(layer: nn.Linear, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    return float(optimizer.param_groups[0]["lr"])


def test_eval_and_train_and_the_later_one_counts(mirror: Mirror) -> None:
    with mirror.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    flags = lambda: (model.training, model[1].training)  # noqa: E731
    assert mirror.run(flags) == [(True, True)] * 2
    model.eval()
    assert mirror.run(flags) == [(False, False)] * 2
    mirror.run(lambda: model.train().training)
    assert model[1].training is True
    mirror.run(lambda: model.train().training)
    model.eval()
    assert mirror.run(flags) == [(False, False)] * 2


def test_attributes_follow_in_both_directions(mirror: Mirror) -> None:
    model = counter(mirror)

    def step() -> int:
        model.mask.add_(1)
        model.limits.pop("low")
        return model.record()

    assert mirror.run(step) == [1, 1]
    assert (model.count, model.history, model.limits) == (1, [1], {"high": 1.0})
    assert model.mask.tolist() == [1.0, 1.0]
    model.count = 5
    model.history.append(7)
    model.limits["high"] = 2.0
    model.mask[0] = 3.0
    model.note = "new"  # type: ignore[assignment]
    seen = mirror.run(lambda: (model.count, model.history, model.limits["high"], model.mask.tolist(), model.note))
    assert seen == [(5, [1, 7], 2.0, [3.0, 1.0], "new")] * 2
    mirror.run(lambda: setattr(model, "note", 1))
    mirror.run(lambda: model.training)
    model.note = 9  # type: ignore[assignment]  # the change of the step before the last is no conflict
    assert mirror.run(lambda: model.note) == [9, 9]
    del model.note
    assert mirror.run(lambda: hasattr(model, "note")) == [False, False]


def test_held_containers_are_written_through(mirror: Mirror) -> None:
    model = counter(mirror)
    limits = model.limits
    mirror.run(lambda: model.count)
    limits["low"] = -1.0
    assert mirror.run(lambda: model.limits["low"]) == [-1.0, -1.0]
    mirror.run(lambda: model.limits.update(high=3.0))
    assert model.limits is limits
    assert limits["high"] == 3.0
    layer, optimizer, _ = schedule(mirror)
    group = optimizer.param_groups[0]
    mirror.run(train, layer, optimizer)
    mirror.run(train, layer, optimizer)
    group["lr"] = 0.125
    assert mirror.run(train, layer, optimizer) == [0.125, 0.125]


def test_scheduler_on_the_driver_without_a_warning(mirror: Mirror) -> None:
    layer, optimizer, scheduler = schedule(mirror)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            rates.append(mirror.run(train, layer, optimizer)[1])
            scheduler.step()
    assert rates == [1.0, 0.5, 0.25]
    assert "tensor_images" not in mirror.link.calls


def test_forward_hook_of_the_driver(mirror: Mirror, layer: nn.Linear) -> None:
    mirror.run(lambda: layer.training)
    handle = layer.register_forward_hook(lambda module, args, output: output * 10)
    assert mirror.run(lambda: layer(torch.ones(2)).item()) == [30.0, 30.0]
    handle.remove()
    assert mirror.run(lambda: layer(torch.ones(2)).item()) == [3.0, 3.0]


def test_changes_of_the_driver_apply_after_those_of_the_step_before(mirror: Mirror) -> None:
    layer, optimizer, scheduler = schedule(mirror)
    model = counter(mirror)

    def step() -> tuple[float, list[int], float]:
        rate = train(layer, optimizer)
        scheduler.step()
        model.record()
        model.limits["high"] += 1.0
        return rate, model.history, model.limits["high"]

    assert mirror.run(step)[1] == (1.0, [1], 2.0)
    scheduler.step()
    model.history.append(7)
    model.limits["high"] *= 10
    assert mirror.run(step)[1] == (0.25, [1, 7, 2], 21.0)
    optimizer.param_groups[0]["lr"] = 3.0
    assert mirror.run(step)[1] == (3.0, [1, 7, 2, 3], 22.0)


@pytest.mark.parametrize("seen_first", [False, True])
def test_held_and_changed_on_both_sides(seen_first: bool, mirror: Mirror) -> None:
    layer, optimizer, _ = schedule(mirror)
    model, other = counter(mirror), counter(mirror)
    group, history, others = optimizer.param_groups[0], model.history, other.history

    def record(own: Counter) -> list[int]:
        own.record()
        return list(own.history)

    def halve() -> float:
        train(layer, optimizer)
        optimizer.param_groups[0]["lr"] /= 2
        return float(optimizer.param_groups[0]["lr"])

    mirror.run(record, model)
    history.append(9)
    assert not seen_first or model.history == [9]
    with pytest.raises(FailedPreconditionError, match=r"history of the module Counter was changed by a step"):
        mirror.run(record, model)
    assert mirror.run(record, model) == [[9, 2]] * 2  # the driver's value
    mirror.run(record, other)
    others.append(9)
    other.history = [5]  # set anew
    assert mirror.run(record, other) == [[5, 2]] * 2
    mirror.run(halve)
    group["lr"] = 0.5
    assert not seen_first or optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(FailedPreconditionError, match=r"param_groups\[0\]\['lr'\] of the optimizer SGD"):
        mirror.run(halve)
    assert mirror.run(halve) == [0.25] * 2


def test_generator_follows_both_ways(mirror: Mirror) -> None:
    generator, plain = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)

    def draw(source: torch.Generator = generator) -> float:
        return torch.rand(1, generator=source).item()

    assert mirror.run(draw) == [draw(plain)] * 2
    assert mirror.run(draw) == [draw(plain)] * 2
    mirror.driver.refresh()
    assert draw() == draw(plain)  # it is fresh here
    mirror.run(draw)
    generator.manual_seed(2)
    assert mirror.run(draw) == [draw(plain.manual_seed(2))] * 2
    draw()
    with pytest.raises(FailedPreconditionError, match="on one side only"):
        mirror.run(draw)


Trained = tuple[Mirror, nn.Linear, torch.optim.Optimizer, Callable[[], float]]


@pytest.fixture
def trained() -> Trained:
    """Momentum 0.5 and constant gradients of 1, after one step."""
    mirror = Mirror()
    layer = linear(mirror)
    with mirror.scope():
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, momentum=0.5)

    def step() -> float:
        optimizer.zero_grad()
        layer(torch.ones(2)).sum().backward()
        optimizer.step()
        return float(optimizer.state[layer.weight]["momentum_buffer"][0, 0])

    mirror.run(step)
    return mirror, layer, optimizer, step


def test_state_dict_is_fresh_and_can_be_loaded(trained: Trained) -> None:
    mirror, layer, optimizer, step = trained
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.zero_grad()
    assert "collect_optimizer_state" not in mirror.link.calls  # the learning rate does not fetch it
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"][0]["momentum_buffer"].tolist() == [[1.0, 1.0]]
    mirror.run(step)
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].tolist() == [[1.5, 1.5]]
    optimizer.load_state_dict(saved)
    assert mirror.run(step) == [1.5, 1.5]
    assert mirror.run(lambda: optimizer.param_groups[0]["params"][0] is layer.weight) == [True, True]


def test_state_written_without_a_version_count(trained: Trained) -> None:
    mirror, layer, optimizer, step = trained
    optimizer.state[layer.weight]["momentum_buffer"].data.zero_()
    assert mirror.run(step) == [1.0, 1.0]
    optimizer.state[layer.weight]["momentum_buffer"].numpy()[:] = 3
    assert mirror.run(step) == [2.5, 2.5]
    assert mirror.run(step) == [2.25, 2.25]
    assert mirror.bytes_of_last["writes"] == 0


def test_write_through_a_kept_reference_is_refused(trained: Trained) -> None:
    mirror, layer, optimizer, step = trained
    momentum = optimizer.state[layer.weight]["momentum_buffer"]
    mirror.run(step)
    momentum.zero_()
    with pytest.raises(FailedPreconditionError, match="states of SGD must be read"):
        mirror.run(step)
    assert optimizer.state[layer.weight]["momentum_buffer"].tolist() == [[1.5, 1.5]]
    assert mirror.run(step) == [1.75, 1.75]
