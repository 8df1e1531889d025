"""The driver half as a whole: programs as users write them."""

from __future__ import annotations

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
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (layer, elsewhere))
    held = [mirror.driver.holds(each) for each in (layer, lazy, mixed, elsewhere, optimizer, other)]
    assert held == [True, False, False, False, True, False]
    mirror.run(lambda: optimizer.param_groups[0]["lr"])
    assert mirror.driver.is_mirrored(layer.weight)
    assert mirror.driver.holds(optimizer)
    mirror.driver.release()
    assert not mirror.driver.holds(layer)


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
    driver = mirror.driver
    assert not any((driver._variables._records, driver._control._known, driver._states._known))


def give_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def reload(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def forget_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state_dict()
    optimizer.state.clear()


CHANGES: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "clear": lambda model, optimizer: optimizer.zero_grad(),
    "give gradients": give_gradients,
    "hook": lambda model, optimizer: next(model.parameters()).register_hook(lambda gradient: gradient * 2),
    "freeze": lambda model, optimizer: model.requires_grad_(False),
    "reload": reload,
    "steer": lambda model, optimizer: (model.eval(), optimizer.param_groups[0].update(lr=0.7)),
    "forget states": forget_states,
}


def run_and_change(mirror: Mirror, change: str) -> Any:
    """Have the replicas train something, then change it here; what was trained."""
    with mirror.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.Adam(model.parameters())

    def train() -> None:
        model(torch.ones(1)).sum().backward()
        optimizer.step()

    mirror.run(train)
    CHANGES[change](model, optimizer)
    return model, optimizer


def on_replica(mirror: Mirror) -> list[object]:
    """What the first replica has, after two more steps."""
    assert mirror.run(lambda: 1) == [1, 1]
    assert mirror.run(lambda: 2) == [2, 2]
    return [type(obj) for _, obj in mirror.replicas[0].items()]


@pytest.mark.usefixtures("quick_gc")
def test_objects_dropped_while_changes_are_collected_are_removed_with_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Python's garbage collector may have it, at any moment."""
    for change in CHANGES:
        mirror = Mirror()
        held = [run_and_change(mirror, change)]
        collect = mirror.driver._collect

        def collect_and_drop(writes: Writes, held: list[Any] = held, collect: Any = collect) -> Any:
            found = collect(writes)
            held.clear()
            gc.collect()
            return found

        monkeypatch.setattr(mirror.driver, "_collect", collect_and_drop)
        assert on_replica(mirror) == [], change


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


def test_what_was_prepared_and_never_sent_is_sent_after_a_reset(mirror: Mirror, layer: nn.Linear) -> None:
    mirror.run(lambda: layer.training)
    late = linear(mirror)
    mirror.driver.prepare(lambda: late.training)  # it was not sent: the step before it had failed
    mirror.driver.reset()
    assert mirror.run(lambda: late.weight.tolist()) == [[[1.0, 2.0]]] * 2


def test_a_read_that_failed_is_tried_again(mirror: Mirror, layer: nn.Linear) -> None:
    mirror.run(lambda: layer.eval() and None)
    replicas = list(mirror.replicas)
    mirror.link.replicas.clear()
    with pytest.raises(IndexError):
        _ = layer.training
    mirror.link.replicas += replicas
    assert not layer.training


def test_tensors_read_or_made_in_inference_mode_can_be_used_by_later_steps(mirror: Mirror) -> None:
    with mirror.scope():
        model: Any = nn.BatchNorm1d(1)
        optimizer = torch.optim.Adam(model.parameters())

    def train() -> float:
        optimizer.zero_grad()
        model(torch.tensor([[1.0], [2.0]])).square().sum().backward()
        optimizer.step()
        return float(optimizer.state[model.weight]["step"])

    for turn in range(3):
        assert mirror.run(train) == [turn + 1.0] * 2
        with torch.inference_mode():
            held = [model.weight, model.weight.grad, model.running_mean, optimizer.state[model.weight]["exp_avg"]]
            assert not any(tensor is None or tensor.is_inference() for tensor in held)
    model.weight.grad.mul_(0)
    assert mirror.run(lambda: model.weight.grad.item()) == [0.0] * 2
    with torch.inference_mode():
        model.register_buffer("note", torch.ones(2))
        model.weight.grad = torch.full((1,), 3.0)
        model.weight.copy_(torch.tensor([5.0]))
    for note, gradient, weight in mirror.run(lambda: (model.note, model.weight.grad, model.weight.detach())):
        assert (note.tolist(), gradient.tolist(), weight.tolist()) == ([1.0, 1.0], [3.0], [5.0])


def test_release_makes_plain_without_a_fetch_and_where_it_fails(mirror: Mirror) -> None:
    other = Mirror()
    layer, second = linear(mirror), linear(other)
    mirror.run(lambda: layer.training)
    mirror.link.replicas.clear()
    with pytest.raises(IndexError):
        mirror.driver.release()
    mirror.driver.release()
    other.run(lambda: second.training)
    other.link.calls.clear()
    other.driver.release(fetch=False)
    assert other.link.calls == []
    with pytest.raises(FailedPreconditionError, match="must be open"):
        other.scope()
    for each in (layer, second):
        assert (type(each), type(each.weight)) == (nn.Linear, nn.Parameter)


def test_release_when_something_cannot_be_fetched(mirror: Mirror, layer: nn.Linear) -> None:
    generator, plain = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    with mirror.scope():
        first, second = (torch.optim.SGD(layer.parameters(), lr=0.5, momentum=0.5) for _ in range(2))

    def step() -> None:
        layer(torch.ones(2) + 0 * torch.rand(2, generator=generator)).sum().backward()
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
    torch.rand(4, generator=plain)
    assert torch.equal(generator.get_state(), plain.get_state())
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
    mirror = Mirror(2, row_holders=1)
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
    mirror = Mirror(1, row_holders=1)
    with mirror.scope():
        embedding = ShardedEmbedding(10, 2, seed=1)
    other = ShardedEmbedding(10, 2, seed=2)
    expected = other(torch.tensor([3]))
    embedding.import_rows(other.export_rows())
    assert mirror.run(lambda: embedding(torch.tensor([3])).tolist()) == [expected.tolist()]
    assert torch.equal(embedding(torch.tensor([3])), expected)
    assert mirror.link.calls.count("pull_rows") == 1
