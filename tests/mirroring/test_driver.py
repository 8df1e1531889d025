"""The driver half as a whole: programs as users write them."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from raydist.core.errors import FailedPreconditionError
from raydist.mirroring.messages import Writes
from raydist.parameter_servers.sharded_embedding import ShardedEmbedding
from tests.mirroring.in_process import Mirror, linear


def build() -> tuple[Any, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.0), nn.Linear(4, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def test_objects_that_can_be_sent_to_replicas() -> None:
    mirror, elsewhere = Mirror(), nn.Linear(1, 1)
    with mirror.scope():
        layer, lazy, mixed = nn.Linear(1, 1), nn.LazyLinear(1), nn.Sequential(nn.Linear(1, 1))
    mixed.append(elsewhere)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (layer, elsewhere)]
    held = [mirror.driver.holds(each) for each in (layer, lazy, mixed, elsewhere, *optimizers)]
    assert held == [True, False, False, False, True, False]
    optimizer = optimizers[0]
    mirror.run(lambda: optimizer.param_groups[0]["lr"])
    assert mirror.driver.is_mirrored(layer.weight)
    assert mirror.driver.holds(optimizer)
    mirror.driver.release()
    assert not mirror.driver.holds(layer)


def program(run: Any, scope: Any) -> tuple[Any, Any, list[float]]:
    """Training, evaluation on the driver, a schedule, freezing, and going back to a checkpoint."""
    with scope():
        model, optimizer, scheduler = build()
        best = copy.deepcopy(model)

    def step(x: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    data = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(8, 3)
    losses = []
    for epoch in range(4):
        model.train()
        losses += [run(step, data), run(step, data * 2)]
        scheduler.step()
        model.eval()
        with torch.no_grad():
            losses.append(float(model(data).sum()))
        if epoch == 0:
            best.load_state_dict(model.state_dict())
            saved = copy.deepcopy(optimizer.state_dict())
        if epoch == 1:
            model.load_state_dict(best.state_dict())
            optimizer.load_state_dict(saved)
            for parameter in model[0].parameters():
                parameter.requires_grad_(False)
    return model.state_dict(), optimizer.state_dict(), losses


class Plain:
    def run(self, fn: Any, *args: Any) -> Any:
        return fn(*args)

    def scope(self) -> Any:
        return torch.enable_grad()


def test_a_program_computes_the_same_with_and_without_mirroring() -> None:
    plain, mirror = Plain(), Mirror()
    weights, state, losses = program(plain.run, plain.scope)
    mirrored_weights, mirrored_state, mirrored_losses = program(lambda *args: mirror.run(*args)[1], mirror.scope)
    assert mirrored_losses == pytest.approx(losses, rel=1e-12)
    torch.testing.assert_close(mirrored_weights, weights, rtol=1e-12, atol=0)
    torch.testing.assert_close(mirrored_state, state, rtol=1e-12, atol=0)


def test_nothing_is_kept_alive(mirror: Mirror) -> None:
    def train() -> weakref.ref[nn.Module]:
        with mirror.scope():
            model, optimizer, scheduler = build()
        model.note = model  # a cycle
        mirror.run(lambda: (optimizer.step(), scheduler.last_epoch, model.training))
        optimizer.state_dict()
        scheduler.step()
        mirror.run(lambda: model.training)
        return weakref.ref(model)

    ghost = train()
    gc.collect()
    assert ghost() is None
    mirror.run(lambda: None)
    mirror.run(lambda: None)
    assert mirror.replicas[0].parameters() == ()


def clear(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def give_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def hook(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    next(model.parameters()).register_hook(lambda gradient: gradient * 2)


def freeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.requires_grad_(False)


def rewrite(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def steer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.eval()
    optimizer.param_groups[0]["lr"] = 0.7


def forget_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state_dict()
    optimizer.state.clear()


CHANGES = [clear, give_gradients, hook, freeze, rewrite, steer, forget_states]


def run_and_change(mirror: Mirror, change: Callable[[nn.Module, torch.optim.Optimizer], None]) -> Any:
    """Have the replicas train something, then change it here; what was trained."""
    with mirror.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.Adam(model.parameters())

    def train() -> None:
        model(torch.ones(1)).sum().backward()
        optimizer.step()

    mirror.run(train)
    change(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("change", CHANGES)
def test_objects_changed_and_then_dropped_are_removed_from_replicas(
    change: Callable[[nn.Module, torch.optim.Optimizer], None], mirror: Mirror
) -> None:
    run_and_change(mirror, change)
    gc.collect()
    assert mirror.run(lambda: 1) == [1, 1]
    assert mirror.replicas[0].items() == []


@pytest.mark.parametrize("change", CHANGES)
def test_objects_dropped_while_changes_are_collected_are_removed_with_the_next_step(
    change: Callable[[nn.Module, torch.optim.Optimizer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python's garbage collector may have it, at any moment."""
    mirror = Mirror()
    held = [run_and_change(mirror, change)]
    collect = mirror.driver._collect

    def collect_and_drop(writes: Writes) -> Any:
        found = collect(writes)
        held.clear()
        gc.collect()
        return found

    monkeypatch.setattr(mirror.driver, "_collect", collect_and_drop)
    assert mirror.run(lambda: 1) == [1, 1]
    assert mirror.run(lambda: 2) == [2, 2]
    assert mirror.replicas[0].items() == []


def test_objects_sent_with_the_last_step_are_not_sent_as_changes_of_the_next(mirror: Mirror, layer: nn.Linear) -> None:
    with mirror.scope():
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    mirror.run(lambda: optimizer.step())
    with mirror.scope():
        layer.late = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [layer.late]})
    mirror.run(lambda: optimizer.step())
    mirror.driver.reset()  # replicas tell all their attributes
    optimizer.param_groups[1]["lr"] = 0.125
    rates = mirror.run(lambda: [group["lr"] for group in optimizer.param_groups])
    assert rates == [[0.5, 0.125]] * 2


def test_tensors_read_in_inference_mode_can_be_used_by_later_steps(mirror: Mirror) -> None:
    with mirror.scope():
        model = nn.BatchNorm1d(1)
        optimizer = torch.optim.Adam(model.parameters())

    def train() -> float:
        optimizer.zero_grad()
        model(torch.tensor([[1.0], [2.0]])).square().sum().backward()
        optimizer.step()
        return optimizer.state[model.weight]["step"].item()  # type: ignore[no-any-return]

    for turn in range(3):
        assert mirror.run(train) == [turn + 1.0] * 2
        with torch.inference_mode():
            held = [model.weight, model.weight.grad, model.running_mean, optimizer.state[model.weight]["exp_avg"]]
            assert not any(tensor is None or tensor.is_inference() for tensor in held)
    assert model.weight.grad is not None
    model.weight.grad.mul_(0)
    assert mirror.run(lambda: model.weight.grad.item()) == [0.0] * 2  # type: ignore[union-attr]


def test_inference_tensors_can_be_arguments(mirror: Mirror, layer: nn.Linear) -> None:
    mirror.run(lambda: layer.training)
    with torch.inference_mode():
        layer.register_buffer("note", torch.ones(2))
        layer.weight.grad = torch.full((1, 2), 3.0)
        layer.weight.copy_(torch.tensor([[5.0, 6.0]]))
    given = mirror.run(lambda: (layer.get_buffer("note"), layer.weight.grad, layer.weight.detach()))
    for note, gradient, weight in given:
        assert (note.tolist(), gradient.tolist(), weight.tolist()) == ([1.0, 1.0], [[3.0, 3.0]], [[5.0, 6.0]])


def test_failed_final_fetch_still_makes_plain(mirror: Mirror) -> None:
    with mirror.scope():
        layer = nn.Linear(1, 1)
    mirror.run(lambda: layer.training)
    mirror.link.replicas.clear()
    with pytest.raises(IndexError):
        mirror.driver.release()
    assert type(layer) is nn.Linear
    assert type(layer.weight) is nn.Parameter
    mirror.driver.release()


def test_release_without_fetching(mirror: Mirror) -> None:
    with mirror.scope():
        layer = nn.Linear(1, 1)
    mirror.run(lambda: layer.training)
    mirror.link.calls.clear()
    mirror.driver.release(fetch=False)
    assert mirror.link.calls == []
    assert type(layer) is nn.Linear


def test_release_after_a_generator_was_used(mirror: Mirror, layer: nn.Linear) -> None:
    generator, plain = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    mirror.run(lambda: layer(torch.rand(2, generator=generator)).sum().backward())
    torch.rand(2, generator=plain)
    mirror.driver.release()
    assert type(layer.weight) is nn.Parameter
    assert torch.equal(generator.get_state(), plain.get_state())


def test_release_when_something_cannot_be_fetched(mirror: Mirror, layer: nn.Linear) -> None:
    with mirror.scope():
        first, second = (torch.optim.SGD(layer.parameters(), lr=0.5, momentum=0.5) for _ in range(2))

    def step() -> None:
        layer(torch.ones(2)).sum().backward()
        first.step()
        second.step()

    mirror.run(step)
    held = first.state[layer.weight]["momentum_buffer"]
    mirror.run(step)
    held.mul_(0)  # nobody can tell whether this or the step was meant
    with pytest.raises(FailedPreconditionError):
        mirror.driver.release()
    mirror.link.calls.clear()
    assert type(layer.weight) is nn.Parameter
    assert layer.weight.tolist() == [[-2.5, -1.5]]
    assert second.state[layer.weight]["momentum_buffer"].tolist() == [[2.5, 2.5]]
    assert not mirror.link.calls


def test_a_payload_tells_the_driver_whether_it_has_values_or_only_settings() -> None:
    mirror = Mirror(1)
    with mirror.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> float:
        return float(optimizer.param_groups[0]["lr"] + 0 * len(model.weight))

    mirror.run(step)
    assert mirror.payloads[-1].has_values
    optimizer.param_groups[0]["lr"] = 0.5
    assert mirror.run(step) == [0.5]
    first = mirror.payloads[-1]
    optimizer.param_groups[0]["lr"] = 0.25
    mirror.run(step)
    assert not first.has_values
    assert first.settings
    assert mirror.payloads[-1].settings == first.settings
    with torch.no_grad():
        model.weight.fill_(1.0)
    mirror.run(step)
    assert mirror.payloads[-1].has_values


def test_a_replica_sends_everything_to_a_driver_that_followed_another_replica() -> None:
    mirror = Mirror(1)
    layer = linear(mirror)
    mirror.run(lambda: layer.eval() and None)
    (replica,) = mirror.replicas
    assert not layer.training
    nothing = replica.collect_control(True)
    replica.tell_everything()
    assert len(replica.collect_control(True)) > len(nothing)


def test_the_driver_reads_and_writes_rows_of_the_first_replica() -> None:
    mirror = Mirror(2, serves_rows=True)
    with mirror.scope():
        embedding = ShardedEmbedding(10, 2, initializer="zeros")
    mirror.run(lambda: embedding(torch.tensor([3, 7])).sum().item())
    rows = torch.tensor([7, 3, 7])
    with torch.no_grad():
        assert embedding(rows).tolist() == [[0, 0]] * 3
        (state,) = embedding.export_rows()
        assert state["rows"].tolist() == [3, 7]
        embedding.import_rows([{**state, "values": torch.tensor([[3.0, 4.0], [7.0, 8.0]])}])
        assert embedding(rows).tolist() == [[7, 8], [3, 4], [7, 8]]
    told = mirror.run(lambda: embedding(torch.tensor([7])).tolist())
    assert told == [[[7, 8]], [[0, 0]]]
    assert mirror.link.calls.count("pull_rows") == 2


def test_rows_from_before_travel_with_the_module_and_are_given_up_here() -> None:
    mirror = Mirror(1, serves_rows=True)
    with mirror.scope():
        embedding = ShardedEmbedding(10, 2, seed=1)
    other = ShardedEmbedding(10, 2, seed=2)
    expected = other(torch.tensor([3]))
    embedding.import_rows(other.export_rows())
    assert mirror.run(lambda: embedding(torch.tensor([3])).tolist()) == [expected.tolist()]
    assert torch.equal(embedding(torch.tensor([3])), expected)
    assert mirror.link.calls.count("pull_rows") == 1
