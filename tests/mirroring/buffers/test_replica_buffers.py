from __future__ import annotations

from typing import Any

import torch
from torch import nn

import raydist as rd
from raydist.mirroring.buffers.replica_buffers import ReplicaBuffers
from raydist.mirroring.handles import ReplicaTable


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
    buffers.look()
    return buffers


def values(buffers: ReplicaBuffers) -> list[Any]:
    return [tensor.tolist() for tensor in buffers.copies()]


def test_parameters_are_no_buffers() -> None:
    assert [handle for handle, _ in buffers_of(nn.BatchNorm1d(1)).items()] == [1, 2, 3]


def test_what_arrives_is_divided_once() -> None:
    buffers = buffers_of(Two(8.0))
    assert buffers.arrived([0, 1, 2, 1]) == [1]
    assert values(buffers) == [2.0, 8.0]
    assert buffers.arrived([0]) == []


def test_a_stand_in_keeps_its_share_and_takes_over_the_rest() -> None:
    buffers = buffers_of(Two(1.0))
    own, others = buffers.copies(), [torch.tensor(5.0), torch.tensor(6.0)]
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
