"""One replica's half: order of parameters, buffers and metrics of other replicas, taking over a whole replica."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from raydist.errors import FailedPreconditionError
from raydist.mirroring.on_replica.replica import MirrorReplica
from raydist.mirroring.shipment import Shipment
from raydist.pickling.pickler import loads
from raydist.values import PerReplica
from tests.mirroring.in_process import Mirror, linear, rank_of


def test_parameters_come_in_one_order() -> None:
    mirror = Mirror(3)
    first, second = linear(mirror, 2), linear(mirror, 3)
    mirror.run(lambda: second.training)
    mirror.run(lambda: (first.training, second.training))
    shapes = [[tuple(parameter.shape) for parameter in replica.parameters()] for replica in mirror.replicas]
    assert shapes == [[(1, 3), (1, 2)]] * 3
    assert all(type(parameter) is nn.Parameter for parameter in mirror.replicas[1].parameters())


def test_buffers_of_another_replica() -> None:
    mirror = Mirror()
    with mirror.scope():
        norm = nn.BatchNorm1d(1, momentum=1.0)
    mirror.run(lambda rank: norm(torch.tensor([[0.0], [4.0]]) + 2 * rank).sum().item(), rank_of(mirror))
    exported = mirror.replicas[0].export_buffers()
    norms = [replica._table.items() for replica in mirror.replicas]
    mirror.replicas[1].import_buffers(exported)
    assert [tensor.tolist() for tensor in mirror.replicas[1].export_buffers()] == [t.tolist() for t in exported]
    assert len(norms[0]) == 6
    assert norm.running_mean is not None
    assert norm.running_mean.tolist() == [2.0]


def test_released_objects_leave_the_replicas() -> None:
    mirror = Mirror()
    keep = linear(mirror)
    drop = linear(mirror, 3)
    mirror.run(lambda model: model.training, drop)
    assert len(mirror.replicas[0].parameters()) == 1
    del drop
    mirror.run(lambda: keep.training)
    assert [tuple(parameter.shape) for parameter in mirror.replicas[0].parameters()] == [(1, 2)]


def trained(mirror: Mirror) -> tuple[Any, torch.optim.Optimizer, torchmetrics.Metric]:
    with mirror.scope():
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        optimizer = torch.optim.Adam(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        metric = torchmetrics.MeanMetric()

    def step(rank: int) -> Any:
        optimizer.zero_grad()
        loss = model(torch.arange(6.0).reshape(3, 2)).pow(2).mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        metric.update(loss.detach() + rank)
        return loss.item()

    for _ in range(3):
        mirror.run(step, rank_of(mirror))
    mirror.run(step, rank_of(mirror))
    return model, optimizer, metric


def test_dump_and_load_are_bit_identical() -> None:
    mirror = Mirror(1)
    trained(mirror)
    old = mirror.replicas[0]
    newcomer = MirrorReplica(0)
    state, handles = old.dump()
    newcomer.load(pickle.loads(pickle.dumps(state)))
    assert len(handles) == len(newcomer._table.items())
    assert all(torch.equal(a, b) for a, b in zip(old.parameters(), newcomer.parameters(), strict=True))
    known = mirror.shipments[0]
    losses = []
    for replica in (old, newcomer):
        function, args, kwargs = replica.apply(Shipment(function=known.function, arguments=known.arguments), [0])
        losses.append(function(*args, **kwargs))
    assert losses[0] == losses[1]
    optimizers = [handle for handle, obj in old._table.items() if isinstance(obj, torch.optim.Optimizer)]
    states = [loads(replica.collect_optimizer_state(optimizers[0]), lambda pid: pid) for replica in (old, newcomer)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key]["exp_avg"], states[1][key]["exp_avg"]) for key in states[0])


def test_reset_after_a_half_done_step() -> None:
    mirror = Mirror()
    model, optimizer, _ = trained(mirror)

    def half(rank: int) -> None:
        with torch.no_grad():
            model[0].weight.add_(1)
        if rank == 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        mirror.run(half, rank_of(mirror))
    mirror.replicas[1].parameters()[0].data.zero_()
    mirror.driver.reset()
    values = [replica.parameters()[0].tolist() for replica in mirror.replicas]
    assert values[0] == values[1] == model[0].weight.tolist()
    assert mirror.run(lambda: model.training) == [True, True]
    assert mirror.run(lambda: optimizer.param_groups[0]["lr"]) == [1e-3 / 16] * 2


def test_reset_keeps_the_running_statistics_of_every_replica() -> None:
    mirror = Mirror(3)
    with mirror.scope():
        norm = nn.BatchNorm1d(1, momentum=0.5)

    def step(rank: int) -> None:
        norm(torch.tensor([[0.0], [4.0]]) + 2 * rank)

    def fail(rank: int) -> None:
        if rank == 1:
            raise ZeroDivisionError
        norm.weight.data.add_(1)

    assert norm.running_mean is not None
    assert norm.num_batches_tracked is not None
    mirror.run(step, rank_of(mirror))
    assert norm.running_mean.item() == 2.0
    with pytest.raises(ZeroDivisionError):
        mirror.run(fail, rank_of(mirror))
    mirror.driver.reset()
    means = [replica.export_buffers()[0].item() for replica in mirror.replicas]
    assert means == [1.0, 2.0, 3.0]
    assert norm.running_mean.item() == 2.0
    assert norm.weight.item() == 2.0
    mirror.run(step, rank_of(mirror))
    assert (norm.running_mean.item(), norm.num_batches_tracked.item()) == (3.0, 2)
    assert [replica.parameters()[0].item() for replica in mirror.replicas] == [2.0, 2.0, 2.0]


def test_reset_after_a_shipment_that_never_arrived() -> None:
    mirror = Mirror()
    layer = linear(mirror)
    mirror.driver.prepare(lambda: layer.training)
    mirror.driver.dispatched()
    mirror.driver.reset()
    assert type(layer.weight) is nn.Parameter
    assert mirror.run(lambda: layer.weight.tolist()) == [[[1.0, 2.0]]] * 2


def test_prepared_but_not_dispatched() -> None:
    mirror = Mirror()
    layer = linear(mirror)
    step = lambda: layer.weight.tolist()  # noqa: E731
    mirror.driver.prepare(step)
    assert type(layer.weight) is nn.Parameter
    assert mirror.run(step) == [[[1.0, 2.0]]] * 2
    layer.weight.data.fill_(3.0)
    mirror.driver.prepare(step)
    assert mirror.run(step) == [[[3.0, 3.0]]] * 2


def test_unknown_digest() -> None:
    with pytest.raises(FailedPreconditionError, match="raydist bug: replica 3"):
        MirrorReplica(3).apply(Shipment(digest=b"never sent"), ())


def test_function_stays_the_same_object_between_steps() -> None:
    mirror = Mirror(1)
    step = lambda value: value  # noqa: E731
    mirror.run(step, PerReplica([1]))
    kept = mirror.replicas[0]._functions._functions.copy()
    mirror.run(step, PerReplica([2]))
    assert mirror.replicas[0]._functions._functions == kept
