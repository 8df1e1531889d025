"""The buffers of a replica: values that a step replaced, and shares of values that add up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.mirroring.apply_update import ReplicaBuffers
from raydist.mirroring.handles import ReplicaTable
from raydist.mirroring.tensor import MirroredTensor
from tests.mirroring.in_process import Mirror, rank_of


class Averaging(nn.Module):
    """Keeps an average and a count, and assigns them anew."""

    mean: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: float) -> float:
        self.mean = 0.5 * self.mean + x
        self.count = self.count + 1
        return self.mean.item()


def averaging(mirror: Mirror) -> Averaging:
    with mirror.scope():
        return Averaging()


def test_statistics_that_a_step_assigns_are_read_as_their_mean(mirror: Mirror) -> None:
    module = averaging(mirror)
    for step, (values, mean) in enumerate([([0.0, 1.0], 0.5), ([0.0, 1.5], 0.75), ([0.0, 1.75], 0.875)], 1):
        assert mirror.run(lambda rank: module(float(rank)), rank_of(mirror)) == values
        assert (module.mean.item(), module.count.item()) == (mean, step)
        assert type(module.mean) is MirroredTensor


@pytest.mark.parametrize("read_first", [False, True])
def test_what_the_driver_writes_replaces_what_a_step_assigned(read_first: bool, mirror: Mirror) -> None:
    module = averaging(mirror)
    mirror.run(lambda rank: module(float(rank)), rank_of(mirror))
    if read_first:
        assert module.mean.item() == 0.5
    module.mean.fill_(8.0)
    module.count.zero_()
    assert mirror.run(lambda rank: module(float(rank)), rank_of(mirror)) == [4.0, 5.0]
    assert (module.mean.item(), module.count.item()) == (4.5, 1)


def test_another_replica_takes_over_what_a_step_assigned(mirror: Mirror) -> None:
    module = averaging(mirror)
    mirror.run(lambda rank: module(float(rank)), rank_of(mirror))
    exported = mirror.replicas[1].export_buffers()
    assert [buffer.tolist() for buffer in exported] == [[1.0], 1]
    mirror.replicas[0].import_buffers(exported)
    assert module.mean.item() == 1.0
    mirror.driver.reset()
    assert mirror.run(lambda rank: module(float(rank)), rank_of(mirror)) == [0.5, 1.5]


def test_a_cast_on_the_driver_leaves_statistics_that_follow(mirror: Mirror) -> None:
    with mirror.scope():
        norm = nn.BatchNorm1d(1, momentum=0.5, affine=False)

    def step(rank: int, kind: torch.dtype) -> Any:
        return norm(torch.ones(2, 1, dtype=kind) * 2 * rank).sum().item()

    mirror.run(step, rank_of(mirror), torch.float32)
    norm.double()
    for mean in (0.75, 0.875):
        mirror.run(step, rank_of(mirror), torch.float64)
        assert norm.running_mean is not None
        assert (norm.running_mean.item(), norm.running_mean.dtype) == (mean, torch.float64)
    assert norm.num_batches_tracked is not None
    assert norm.num_batches_tracked.item() == 3


def test_a_buffer_of_two_modules_that_one_of_them_replaces_stays_the_others(mirror: Mirror) -> None:
    with mirror.scope():
        first, second = Averaging(), Averaging()
        second.mean = first.mean
    mirror.run(lambda: (first(1.0), second.mean.item()))
    assert (first.mean.item(), second.mean.item()) == (1.0, 0.0)


def table_of(*objects: Any) -> ReplicaTable:
    table = ReplicaTable()
    for handle, obj in enumerate(objects):
        table.add(handle, obj)
    return table


def test_only_values_are_put_back() -> None:
    module, other = Averaging(), torch.ones(3)
    mean, count = module.mean, module.count
    places = ReplicaBuffers(table_of(module, mean, count, other), 0, 1)
    places.note_places(0)
    module.mean = torch.full((2,), 7.0)
    del module.count
    places.settle()
    assert module.mean is mean
    assert mean.tolist() == [7.0, 7.0]
    assert "count" not in module._buffers
    module.mean = other  # a mirrored one
    places.settle()
    assert module.mean is other
    places.forget(0)
    module.mean = torch.zeros(1)
    places.settle()
    assert module.mean is not mean


class Two(nn.Module):
    """A buffer that adds up and one that is averaged."""

    added: torch.Tensor
    averaged: torch.Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("added", torch.tensor(value))
        self.register_buffer("averaged", torch.tensor(value))
        rd.set_aggregation(self, "added", aggregation="sum")


def buffers_of(module: nn.Module, rank: int = 1, world_size: int = 4) -> ReplicaBuffers:
    table = ReplicaTable()
    for handle, obj in enumerate((module, *module.buffers(), *module.parameters())):
        table.add(handle, obj)
    buffers = ReplicaBuffers(table, rank, world_size)
    buffers.update_aggregations()
    return buffers


def values(buffers: ReplicaBuffers) -> list[Any]:
    return [tensor.tolist() for _, tensor in buffers.items()]


def test_parameters_are_no_buffers() -> None:
    assert [handle for handle, _ in buffers_of(nn.BatchNorm1d(1)).items()] == [1, 2, 3]


def test_what_arrives_is_divided_once() -> None:
    buffers = buffers_of(Two(8.0))
    buffers.arrived([0, 1, 2, 1])
    assert values(buffers) == [2.0, 8.0]
    buffers.arrived([0])
    assert values(buffers) == [2.0, 8.0]


def test_a_stand_in_keeps_its_share_and_takes_over_the_rest() -> None:
    buffers = buffers_of(Two(1.0))
    own = [tensor.clone() for _, tensor in buffers.items()]
    others = [torch.tensor(5.0), torch.tensor(6.0)]
    buffers.take_over(others, own)
    assert values(buffers) == [1.0, 6.0]
    buffers.take_over(others, ())
    assert values(buffers) == [5.0, 6.0]


def test_own_values_come_back_and_a_new_replica_has_no_share() -> None:
    buffers = buffers_of(Two(1.0))
    own = buffers.own_values()
    buffers.take_over([torch.tensor(5.0)] * 2, ())
    for handle in (1, 2):
        buffers.restore_own(handle, own)
    assert values(buffers) == [1.0, 1.0]
    for handle in (1, 2):
        buffers.restore_own(handle, {})
    assert values(buffers) == [0.0, 1.0]


def test_dropped_buffers_are_not_agreed_on() -> None:
    module = Two(1.0)
    rd.set_aggregation(module, "added", aggregation="mean", synchronization="on_write")
    buffers = buffers_of(module)
    assert buffers.written() == [(module.added, "mean")]
    buffers.forget(1)
    assert buffers.written() == []
