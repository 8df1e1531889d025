"""Modules that the program divides on a mesh of replicas train what one device trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics import SumMetric

import raydist as rd
from raydist.testing import strategy_contract as contract
from tests.shared_strategies import KeptStrategies
from tests.strategies.test_sharded import EXCEPTIONS

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

LIMITS = rd.Timeouts(start_s=60, collective_s=20, step_s=60, close_s=5)


class Layer(nn.Module):
    """Attention whose heads can be divided, and a multi-layer perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.queries, self.keys, self.values = (nn.Linear(width, width) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(x)
        parts = [
            part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.queries, self.keys, self.values)
        ]
        x = x + self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """Two layers between parameters that stay whole under tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.layers = nn.ModuleList(Layer(8, 4) for _ in range(2))
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x.mean(1))


def divide(model: Any, mesh: Any) -> None:
    """Divide heads and hidden values along "tensor"; then everything along "shard", if there is such an axis."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns, rows = ("queries", "keys", "values", "up"), ("out", "down")
    plan = {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}
    if not isinstance(model, Net):
        return
    for layer in model.layers:
        parallelize_module(layer, mesh["tensor"], plan)
        layer.heads = 4 // mesh["tensor"].size()
        if "shard" in mesh.mesh_dim_names:
            fully_shard(layer, mesh=mesh["shard"])
    if "shard" in mesh.mesh_dim_names:
        fully_shard(model, mesh=mesh["shard"])


def start(mesh: dict[str, int]) -> rd.MeshStrategy:
    return rd.MeshStrategy(mesh, divide, timeouts=LIMITS, resources_per_replica={"CPU": 0.01})


@pytest.fixture
def tensor(kept: KeptStrategies) -> rd.MeshStrategy:
    return kept.get(rd.MeshStrategy, lambda size: start({"tensor": size}), 2)


Optimize = Callable[[nn.Module], torch.optim.Optimizer]


def train(strategy: rd.Strategy, norm_type: float = 2.0) -> tuple[dict[str, torch.Tensor], list[float], float]:
    """Train with clipped gradients and an uneven last batch; return the state, the norms, and what a metric counted."""
    torch.manual_seed(4)
    rows, labels = torch.randn(22, 5, 4, dtype=torch.float64), torch.randint(0, 3, (22,))
    with strategy.scope():
        model, total = Net().double(), SumMetric()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        norm = rd.clip_grad_norm_(model.parameters(), 0.1, norm_type)
        optimizer.step()
        total.update(float(len(inputs)))
        return norm.detach()

    batches = strategy.distribute_dataset(rd.Dataset.from_tensor_slices((rows, labels)).batch(6))
    norms = [strategy.local_results(strategy.run(step, args=(batch,))) for batch in batches]
    assert {len(each) for each in norms} == {strategy.num_replicas_in_sync}
    state = {name: each.clone() for name, each in model.state_dict().items()}
    return state, [float(each[0]) for each in norms], float(total.compute())


def check(strategy: rd.Strategy, norm_type: float = 2.0) -> None:
    expected, norms, total = train(rd.OneDeviceStrategy("cpu"), norm_type)
    found, found_norms, found_total = train(strategy, norm_type)
    assert max(float((each - found[name]).abs().max()) for name, each in expected.items()) < 1e-9
    assert found_norms == pytest.approx(norms, rel=1e-9)
    assert (total, found_total) == (22.0, 22.0), "rows count once, however many replicas get them"


def test_tensor_parallel_replicas_train_what_one_device_trains(tensor: rd.MeshStrategy) -> None:
    assert tensor.num_replicas_in_sync == 1
    check(tensor)
    check(tensor, norm_type=math.inf)


@pytest.mark.long
def test_two_axes_train_what_one_device_trains(ray_cluster: None) -> None:
    with start({"shard": 2, "tensor": 2}) as strategy:
        assert strategy.num_replicas_in_sync == 2
        check(strategy)
        check(strategy, norm_type=math.inf)


def test_checkpoints_and_the_mesh_in_a_step(tensor: rd.MeshStrategy, tmp_path: Path) -> None:
    torch.manual_seed(1)
    with tensor.scope():
        model = Net().double()
    expected = {name: each.clone() for name, each in model.state_dict().items()}

    def step() -> tuple[tuple[int, ...], int]:
        part: Any = model.layers[0].get_parameter("up.weight")
        return tuple(part.to_local().shape), rd.get_replica_context().device_mesh["tensor"].size()

    assert tensor.run(step) == ((8, 8), 2)
    rd.Checkpoint(model=model).save(tmp_path / "saved")
    alone = Net().double()
    rd.Checkpoint(model=alone).restore(tmp_path / "saved")
    assert all(torch.equal(each, expected[name]) for name, each in alone.state_dict().items())
    with torch.no_grad():
        model.get_parameter("layers.1.down.weight").zero_()
    rd.Checkpoint(model=model).restore(tmp_path / "saved")
    assert all(torch.equal(each, expected[name]) for name, each in model.state_dict().items())
    with pytest.raises(rd.FailedPreconditionError, match="There is a device mesh under ShardedStrategy, MeshStrategy"):
        rd.OneDeviceStrategy("cpu").run(lambda: rd.get_replica_context().device_mesh)


def test_replicas_with_the_same_rows_draw_no_batches(tensor: rd.MeshStrategy) -> None:
    iterator = iter(tensor.distribute_dataset(rd.Dataset.range(4).batch(2)))
    with pytest.raises(rd.FailedPreconditionError, match="that get the same rows cannot draw batches themselves"):
        tensor.run(lambda batches: next(batches), args=(iterator,))


def test_arguments_that_cannot_be(ray_cluster: None) -> None:
    cases: list[tuple[Any, str]] = [
        ({}, "mesh must be sizes"),
        ({"shard": 0}, "mesh must be sizes"),
        ({1: 2}, "mesh must be sizes"),
        ({"tensor": 2, "shard": 2}, "must come first in mesh"),
    ]
    for mesh, message in cases:
        with pytest.raises(rd.InvalidArgumentError, match=message):
            rd.MeshStrategy(mesh, divide)
    with pytest.raises(rd.InvalidArgumentError, match="parallelize must be a function"):
        rd.MeshStrategy({"tensor": 2}, None)  # type: ignore[arg-type]
    strategy = rd.MeshStrategy({"tensor": 2}, divide, devices=3, resources_per_replica={"CPU": 0.01})
    with pytest.raises(rd.InvalidArgumentError, match=r"as many replicas as the mesh, 2 \(tensor 2\), got 3"):
        _ = strategy.num_replicas_in_sync


@pytest.mark.long
def test_parameters_whose_gradients_nothing_adds_up(ray_cluster: None) -> None:
    def divide_without_shard(model: Any, mesh: Any) -> None:
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        parallelize_module(model, mesh["tensor"], ColwiseParallel())

    strategy = rd.MeshStrategy(
        {"shard": 2, "tensor": 1}, divide_without_shard, timeouts=LIMITS, resources_per_replica={"CPU": 0.01}
    )
    try:
        with strategy.scope():
            layer = nn.Linear(2, 2)
        with pytest.raises(rd.InvalidArgumentError, match="'weight' of Linear without the axis shard"):
            strategy.local_results(strategy.run(lambda: layer(torch.ones(1, 2)).sum().item()))
    finally:
        strategy._abort(fetch=False)


def test_gradients_that_the_program_has_set_are_exchanged_before_they_are_clipped(mirrored: Any) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)

    def step() -> tuple[float, float]:
        weight.grad = torch.full((1,), 1.0 + rd.get_replica_context().replica_id_in_sync_group)
        norm = rd.clip_grad_norm_([weight], 0.5)
        optimizer.step()
        return float(norm), float(weight.grad)

    assert strategy.local_results(strategy.run(step)) == (pytest.approx((1.5, 0.5), rel=1e-4),) * 2


def shard_all(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=mesh["shard"])


def leave_whole(model: nn.Module, mesh: Any) -> None:
    """Divide nothing: replicas with the same rows compute the same."""


@pytest.fixture
def shards(ray_cluster: None) -> Iterator[rd.MeshStrategy]:
    """Two replicas that divide everything by torch's own `fully_shard`."""
    with rd.MeshStrategy({"shard": 2}, shard_all, timeouts=LIMITS, resources_per_replica={"CPU": 0.01}) as made:
        yield cast("rd.MeshStrategy", made)


DRAW_INSIDE = {"check_batches", "check_aggregation"}


@pytest.mark.long
def test_contract(shards: rd.MeshStrategy) -> None:
    for check in contract.CHECKS:
        if check.__name__ not in EXCEPTIONS:
            check(shards)


def test_contract_where_replicas_get_the_same_rows(ray_cluster: None) -> None:
    with rd.MeshStrategy({"tensor": 2}, leave_whole, timeouts=LIMITS, resources_per_replica={"CPU": 0.01}) as strategy:
        for check in contract.CHECKS:
            if check.__name__ not in EXCEPTIONS | DRAW_INSIDE:
                check(strategy)


def test_passes_without_gradients_leave_nothing_gathered(shards: rd.MeshStrategy) -> None:
    """FSDP keeps the parameters of the outermost module gathered until a backward pass."""
    with shards.scope():
        model = nn.Linear(2, 2)

    def train() -> None:
        model.zero_grad()
        model(torch.ones(3, 2)).sum().backward()

    def evaluate(context: Callable[[], Any]) -> Any:
        with context():
            return model(torch.ones(3, 2)).sum()

    for number, context in enumerate((torch.no_grad, torch.inference_mode)):
        shards.run(train)
        shards.run(evaluate, args=(context,))
        gradient = model.weight.grad
        assert gradient is not None
        assert gradient.tolist() == [[3.0, 3.0], [3.0, 3.0]]
        with torch.no_grad():
            model.weight.fill_(number)
            model.bias.fill_(1.0)
        found = shards.local_results(shards.run(evaluate, args=(context,)))
        assert float(found[0]) == 6 + 12 * number, "with the values that the driver has written"
