"""`CommunicationOptions` and cross-device operations on running replicas."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.context.devices import Device
from raydist.strategies.cross_device_ops import accumulation_of, options_of
from tests.conftest import live_actors

Seen = tuple[bool, int, set[float]]
"""True if gloo has threads here; the number of buckets of a backward pass; the gradients."""


def seen_on_replicas(options: rd.CommunicationOptions) -> tuple[Seen, ...]:
    """Of two layers of 400 bytes, whose gradients are 2/9 on one replica and 0 on the other."""
    with rd.MirroredStrategy(["CPU:0", "CPU:1"], communication_options=options) as strategy:
        with strategy.scope():
            model = nn.Sequential(nn.Linear(1, 100, bias=False), nn.Linear(100, 1, bias=False))

        def step() -> Seen:
            share = 2 / 9 if rd.get_replica_context().replica_id_in_sync_group == 0 else 0.0
            model.zero_grad()
            with torch.profiler.profile(acc_events=True) as profile:
                (share * torch.cat([parameter.flatten() for parameter in model.parameters()])).sum().backward()
            buckets = {event.key for event in profile.key_averages() if event.key.startswith("raydist::bucket")}
            found = [parameter.grad for parameter in model.parameters()]
            gradients = {value for gradient in found if gradient is not None for value in gradient.flatten().tolist()}
            threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
            return any("gloo" in name for name in threads), len(buckets), gradients

        strategy.run(step)  # the first pass has one bucket for all
        return strategy.local_results(strategy.run(step))


@pytest.mark.ray
@pytest.mark.timeout(120)
@pytest.mark.long
def test_replicas_do_as_they_are_asked(ray_cluster: None) -> None:
    ninth = torch.tensor(1 / 9)
    for options, expected in (
        (rd.CommunicationOptions(implementation="gloo", bytes_per_pack=500), (True, 2, {ninth.item()})),
        (rd.CommunicationOptions(compression="fp16"), (False, 1, {ninth.half().item()})),
    ):
        assert seen_on_replicas(options) == (expected, expected), options


DEVICES = [Device("CPU", index) for index in range(3)]


def test_operations_become_options() -> None:
    operations: tuple[tuple[rd.CrossDeviceOps, Any], ...] = (
        (rd.NcclAllReduce(), "nccl"),
        (rd.HierarchicalCopyAllReduce(2), "hierarchical"),
        (rd.ReductionToOneDevice(), "auto"),
    )
    for ops, implementation in operations:
        merged = options_of(ops, rd.CommunicationOptions(bytes_per_pack=7, timeout_seconds=3.0))
        assert merged == rd.CommunicationOptions(7, 3.0, implementation)
        assert options_of(ops, None) == ops.communication_options
    with pytest.raises(rd.InvalidArgumentError, match="'hierarchical'.* and 'gloo'"):
        rd.MirroredStrategy(
            "cpu", rd.HierarchicalCopyAllReduce(), communication_options=rd.CommunicationOptions(implementation="gloo")
        )
    others: tuple[Any, ...] = (object(), "nccl", rd.NcclAllReduce)
    for wrong in others:
        with pytest.raises(rd.InvalidArgumentError, match=r"rd.NcclAllReduce\(\)"):
            rd.MirroredStrategy("cpu", wrong)
    packs: tuple[Any, ...] = (-1, 1.5, True)
    for number, kind in itertools.product(packs, (rd.NcclAllReduce, rd.HierarchicalCopyAllReduce)):
        with pytest.raises(rd.InvalidArgumentError, match="num_packs must be a number of packs >= 0"):
            kind(number)


@pytest.mark.ray
def test_what_does_not_serve_the_devices_is_told_before_anything_starts(ray_cluster: None) -> None:
    before = live_actors()
    strategy = rd.MirroredStrategy(["CPU:0", "CPU:1"], rd.NcclAllReduce())
    message = "backend 'nccl' must be on one of cuda, got device cpu. Let raydist choose.*cross_device_ops"
    with pytest.raises(rd.InvalidArgumentError, match=message), strategy.scope():
        pass
    assert live_actors() == before
    strategy.close()


def test_the_device_that_reduces_is_one_of_the_strategy() -> None:
    for device, root in ((None, 0), ("CPU:2", 2), (torch.device("cpu", 1), 1)):
        accumulation = accumulation_of(rd.ReductionToOneDevice(device), DEVICES)
        assert accumulation is not None
        assert accumulation.root == root
    assert accumulation_of(rd.NcclAllReduce(), DEVICES) is None
    assert accumulation_of(None, DEVICES) is None
    with pytest.raises(rd.InvalidArgumentError, match="CPU:0, CPU:1, CPU:2, got CPU:3"):
        accumulation_of(rd.ReductionToOneDevice("cpu:3"), DEVICES)
    with pytest.raises(rd.InvalidArgumentError, match="tpu"):
        rd.ReductionToOneDevice("tpu")
    with pytest.raises(rd.InvalidArgumentError, match="accumulation_fn"):
        rd.ReductionToOneDevice(None, 3)  # type: ignore[arg-type]  # the point of this test


def add_and_note(path: Path, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    with path.open("a") as file:
        file.write(f"{rd.get_replica_context().replica_id_in_sync_group} adds up {len(tensors)}\n")
    return torch.stack(list(tensors)).sum(0)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_one_replica_adds_up_for_all(tmp_path: Path) -> None:
    noted = tmp_path / "noted"
    with rd.MirroredStrategy(2, rd.ReductionToOneDevice("CPU:1", partial(add_and_note, noted))) as strategy:
        with strategy.scope():
            model = torch.nn.Linear(1, 1, bias=False)
            torch.nn.init.ones_(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def step(batch: torch.Tensor) -> float:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            context = rd.get_replica_context()
            return float(context.all_reduce(rd.ReduceOp.SUM, batch.sum()))

        batches = strategy.distribute_dataset(rd.Dataset.from_tensor_slices(torch.tensor([[1.0], [2.0]])).batch(2))
        results = [strategy.local_results(strategy.run(step, args=(batch,))) for batch in batches]
        assert [[float(result) for result in each] for each in results] == [[3.0, 3.0]]
        assert model.weight.item() == 1.0 - 1.5
    assert set(noted.read_text().splitlines()) == {"1 adds up 2"}
