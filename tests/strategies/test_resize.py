"""Another number of replicas in the middle of training: results are those of a run that was never resized."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import nn

import raydist as rd
from tests.conftest import live_actors

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

NUM_ROWS, ROWS = 156, 12
LIMITS = rd.Timeouts(start_s=60, collective_s=15, step_s=60, close_s=5)
RESOURCES = {"CPU": 0.01}


@pytest.fixture(scope="module")
def strategy(ray_cluster: None, shared_actors: set[str]) -> Iterator[rd.MirroredStrategy]:
    made = rd.MirroredStrategy(1, resources_per_replica=RESOURCES, timeouts=LIMITS)
    with made:
        yield made


@pytest.fixture
def mirrored(
    strategy: rd.MirroredStrategy, shared_actors: set[str], shared_threads: set[threading.Thread]
) -> Iterator[rd.MirroredStrategy]:
    """A strategy of one replica, which the tests of this file share."""
    yield strategy
    strategy.resize(1)
    shared_actors |= live_actors()
    shared_threads |= {thread for thread in threading.enumerate() if thread.name == "raydist-dispatch"}


@dataclass
class Trained:
    values: dict[str, torch.Tensor]
    mean: float
    rows: list[int]


class Net(nn.Module):
    """Two layers, a running mean, and a buffer whose shares add up."""

    level: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.register_buffer("level", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
        rd.set_aggregation(self, "seen", aggregation="sum")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.level.lerp_(x.mean(0), 0.1)
        self.seen += x.sum()
        found: torch.Tensor = self.layers(x)
        return found


def train(strategy: Any, sizes: Mapping[int, int], *, ahead: int = 0) -> Trained:
    """Train two epochs, and resize before the steps in `sizes`; `ahead` batches are drawn before each step."""
    torch.manual_seed(0)
    inputs = torch.randn(NUM_ROWS, 4, dtype=torch.float64)
    data = rd.Dataset.from_tensor_slices((torch.arange(NUM_ROWS), inputs)).shuffle(NUM_ROWS, seed=1).batch(ROWS)
    with strategy.scope():
        model, mean = Net(), rd.Mean()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(batch: Any) -> Any:
        numbers, x = batch
        optimizer.zero_grad()
        mean.update(x.sum(1))
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        return numbers

    found: list[Any] = []
    number = 0
    view = strategy.distribute_dataset(data)
    for _ in range(2):
        drawn: list[Any] = []
        batches = iter(view)
        while True:
            if number in sizes:
                strategy.resize(sizes[number])
                assert strategy.num_replicas_in_sync == len(strategy.worker_devices) == sizes[number]
            drawn += [batch for batch in [next(batches, None) for _ in range(1 + ahead - len(drawn))] if batch]
            if not drawn:
                break
            found.append(strategy.run(step, args=(drawn.pop(0),)))
            number += 1
    rows = [int(row) for each in found for part in strategy.local_results(each) for row in part]
    values = {name: each.clone() for name, each in model.state_dict().items()}
    for index, state in enumerate(optimizer.state.values()):
        values |= {f"{index}.{name}": torch.as_tensor(each).clone() for name, each in state.items()}
    return Trained(values, float(mean.compute()), rows)


def require_same(one: Trained, other: Trained) -> None:
    assert one.rows == other.rows
    assert one.mean == pytest.approx(other.mean, rel=1e-12)
    for name, value in one.values.items():
        torch.testing.assert_close(value, other.values[name], rtol=1e-9, atol=1e-9, msg=name)


def test_any_sizes_give_the_results_of_one_device(mirrored: rd.MirroredStrategy) -> None:
    once = train(rd.OneDeviceStrategy("cpu"), {})
    require_same(train(mirrored, {3: 3, 8: 2, 14: 3, 20: 1}, ahead=2), once)
    assert sorted(once.rows) == sorted([*range(NUM_ROWS)] * 2)


def test_a_replica_lost_after_or_while_the_number_changes_is_replaced(
    mirrored: rd.MirroredStrategy, tmp_path: Path
) -> None:
    with mirrored.scope():
        model = Fragile(tmp_path)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> int:
        if rd.get_replica_context().replica_id_in_sync_group == 1:
            die_once(tmp_path / "step")
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        return os.getpid()

    first = mirrored.run(step)
    (tmp_path / "load").touch()
    (tmp_path / "step").touch()
    mirrored.resize(2)  # a process dies when it takes over the model
    pids = mirrored.local_results(mirrored.run(step))  # and another one in its first step
    assert [failure.ranks for failure in mirrored.failures()] == [(1,)]
    assert not list(tmp_path.iterdir())
    assert len({first, *pids}) >= 2
    assert model.weight.item() == pytest.approx(1 - 2 * 0.1)


def die_once(flag: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        flag.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


class Fragile(nn.Linear):
    """Kills, once, the process that unpickles it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(1, 1, bias=False)
        nn.init.ones_(self.weight)
        self.folder = folder

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)
        die_once(self.folder / "load")


def test_what_cannot_change_says_so_and_goes_on(mirrored: rd.MirroredStrategy) -> None:
    with mirrored.scope():
        model = nn.Linear(1, 1, bias=False)

    def accumulate() -> None:
        with rd.get_replica_context().no_sync():
            model(torch.ones(1, 1)).sum().backward()

    mirrored.resize(2)
    mirrored.run(accumulate)
    with pytest.raises(rd.FailedPreconditionError, match=r"some of no_sync\(\) wait"):
        mirrored.resize(1)
    mirrored.run(lambda: model.zero_grad())
    dealt = mirrored.distribute_datasets_from_function(lambda context: rd.Dataset.range(6).batch(1))
    batches = iter(dealt)
    rows = [row for part in next(batches).values for row in part.tolist()]
    with pytest.raises(rd.FailedPreconditionError, match="has begun, and comes from a function"):
        mirrored.resize(1)
    assert rows + [row for batch in batches for part in batch.values for row in part.tolist()] == list(range(6))
    mirrored.resize(1)
    with pytest.raises(rd.FailedPreconditionError, match="must be distributed again"):
        iter(dealt)
    with pytest.raises(rd.InvalidArgumentError, match="num_replicas must be a number >= 1, got 0"):
        mirrored.resize(0)
    with rd.CentralStorageStrategy(2) as central, pytest.raises(rd.FailedPreconditionError, match="must keep its 2"):
        central.resize(1)
    each_two = rd.MultiWorkerMirroredStrategy(1, 2, resources_per_replica=RESOURCES)
    with each_two, pytest.raises(rd.InvalidArgumentError, match="must be a multiple of 2, got 3"):
        each_two.resize(3)
    here = rd.SimpleClusterResolver(rd.ClusterSpec({"worker": [ray.util.get_node_ip_address()]}), "worker", 0)
    named = rd.MultiWorkerMirroredStrategy(None, 1, cluster_resolver=here, resources_per_replica=RESOURCES)
    with named, pytest.raises(rd.FailedPreconditionError, match="names 1 workers, so their number cannot change"):
        named.resize(2)
